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


def marking(method: Callable[..., object]) -> Callable[..., object]:
    """A method that may give a layer weights. With delay_wgrad_compute, skip_backward_post_hook marks them: hooks of
    the backward pass then know that there is no gradient yet."""

    @functools.wraps(method)
    def marked(self: ProductModule, *args: object, **options: object) -> object:
        result = method(self, *args, **options)
        for name in self.weight_names if self.delay_wgrad_compute else ():
            if self._parameters.get(name) is not None:
                self._parameters[name].skip_backward_post_hook = True
        return result

    return marked


def with_hooks(compute: Callable[[ProductModule], None]) -> Callable[[ProductModule], None]:
    """backward_dw() that calls the registered functions."""

    @functools.wraps(compute)
    def backward_dw(self: ProductModule) -> None:
        compute(self)
        for hook in vars(self).get(_HOOKS, ()) if self.need_backward_dw() else ():
            hook()

    return backward_dw
