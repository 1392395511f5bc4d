"""How frameworks learn that a layer with delay_wgrad_compute has computed the gradients of its weights."""

import functools
from collections.abc import Callable

from quire.nn.product_module import ProductModule

_HOOKS = "wgrad_accumulation_and_reduce_hooks"


def register_wgrad_accumulation_and_reduce_hooks(
    self: ProductModule, wgrad_accumulation_and_reduce_hook: Callable[[], object]
) -> None:
    """Registers a function without arguments, which backward_dw() calls after it has computed gradients."""
    vars(self).setdefault(_HOOKS, []).append(wgrad_accumulation_and_reduce_hook)


def with_marks(construct: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose layer, with delay_wgrad_compute, marks its weights by skip_backward_post_hook: hooks of the
    backward pass then know that there is no gradient yet."""

    @functools.wraps(construct)
    def __init__(self: ProductModule, *args: object, **options: object) -> None:
        construct(self, *args, **options)
        for name in self.weight_names if self.delay_wgrad_compute else ():
            getattr(self, name).skip_backward_post_hook = True

    return __init__


def with_hooks(compute: Callable[[ProductModule], None]) -> Callable[[ProductModule], None]:
    """backward_dw() that calls the registered functions."""

    @functools.wraps(compute)
    def backward_dw(self: ProductModule) -> None:
        compute(self)
        for hook in vars(self).get(_HOOKS, ()) if self.need_backward_dw() else ():
            hook()

    return backward_dw
