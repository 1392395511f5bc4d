"""Activation checkpointing: quire's recomputes a forward pass with the same recipe and scales, and PyTorch's raises an
error where it would recompute under another recipe, or with other scales."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.utils.checkpoint as pytorchs

from quire.autocast import Reentered
from quire.checks import check_type
from quire.delayed import RecordedScales
from quire.delayed.forward import PresentStep
from quire.delayed.rules import THREAD, trains
from quire.recipe import Recipe

#: Keywords that torch.utils.checkpoint.checkpoint has for itself.
_OWN = {"preserve_rng_state"} | {
    name
    for name, parameter in inspect.signature(pytorchs.checkpoint).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
#: The frame of which has the generator.
_CHECKPOINT = inspect.unwrap(pytorchs.checkpoint).__code__


def checkpoint(function: Callable[..., object], *args: object, use_reentrant: bool = False, **kwargs: object) -> object:
    """torch.utils.checkpoint.checkpoint(function, *args), with one addition: backward recomputes function with the
    present recipe and the present scales of delayed scaling. So backward can run outside of quire.autocast, in another
    thread, and after other forward passes.

    Within a compiled function the checkpoint is a part of the graph. There, enter quire.autocast around the checkpoint:
    Dynamo allows no writes to Python objects inside one, neither an autocast nor the kept codes of is_first_microbatch
    (torch._dynamo.exc.Unsupported with fullgraph=True).

    Args:
        function: the function whose results backward computes again.
        *args: its arguments.
        use_reentrant: as for torch.utils.checkpoint.checkpoint.
        **kwargs: options of torch.utils.checkpoint.checkpoint, or keyword arguments of function.

    Returns:
        What function returns.
    """
    check_type("quire.checkpoint", Callable, function=function)
    check_type("quire.checkpoint", bool, use_reentrant=use_reentrant)
    if torch.compiler.is_compiling():  # a graph computes again what it has computed, and its scales are its inputs
        return pytorchs.checkpoint(function, *args, use_reentrant=False, **kwargs)
    if use_reentrant:  # PyTorch's takes no keywords of the function
        function = functools.partial(function, **{name: kwargs.pop(name) for name in kwargs.keys() - _OWN})
    recipe, scales = Reentered(), RecordedScales()

    def as_now(*args: object, **kwargs: object) -> object:
        with recipe, scales:
            return function(*args, **kwargs)

    try:
        return pytorchs.checkpoint(as_now, *args, use_reentrant=use_reentrant, **kwargs)
    except BaseException as error:
        _end_hooks(error)
        raise


def _end_hooks(error: BaseException) -> None:
    """Ends what PyTorch before 2.13 leaves after an error of the function: its hooks for saved tensors belong to a
    generator, which lives as long as the error's traceback, and until then they see what later code saves."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is _CHECKPOINT:
            traceback.tb_frame.clear()
        traceback = traceback.tb_next


# ------------------------------------------------------------ PyTorch's checkpoint

_OTHER_SCALES = "used scales of delayed scaling that entering quire.autocast has replaced since"


@dataclass(frozen=True, eq=False)
class _Differing(Recipe):
    """What is active while a function is recomputed where not the same is active as in its first pass: a recipe that
    asks each layer whether it makes a difference to this layer. Calls in the same surroundings cost nothing."""

    first: Reentered
    now: Reentered
    step: PresentStep

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_layer", True)

    def of_layer(self, layer: torch.nn.Module) -> Recipe | None:
        before, now = self.first.recipe_of(layer), self.now.recipe_of(layer)
        return self._the_same(f"quire.{type(layer).__name__}", before, now, layer.products)

    def in_force(self) -> Recipe | None:
        """As Recipe.in_force(). Raises RuntimeError where it is another recipe than in the first pass."""
        return self._the_same("quire.active_recipe", self.first.active_recipe(), self.now.active_recipe(), ("",))

    def _the_same(
        self, what: str, before: Recipe | None, now: Recipe | None, products: tuple[str, ...]
    ) -> Recipe | None:
        was, text = _text(self.first, before, products), _text(self.now, now, products)
        if was != text:
            raise _error(what, f"ran under {was}, and the recomputation runs under {text}")
        if now is not None and now.delayed() and self.step.ended():
            raise _error(what, _OTHER_SCALES)
        return now


def _text(context: Reentered, recipe: Recipe | None, products: tuple[str, ...]) -> str:
    """What decides about the results of these matmuls of a layer."""
    each = [None if recipe is None else recipe.of_product(product) for product in products]
    texts = [(context.text_of(one), one is not None and one.delayed()) for one in each]
    texts = [f"{text!r}{' (delayed)' * delayed}" if text else "no recipe" for text, delayed in texts]
    return texts[0] if len(set(texts)) == 1 else " and ".join(texts)


def _error(what: str, difference: str) -> pytorchs.CheckpointError:
    return pytorchs.CheckpointError(
        f"{what}: torch.utils.checkpoint recomputes a forward pass that {difference}, so gradients would be wrong. Use "
        "quire.checkpoint, or call backward within the quire.autocast of the forward pass, and within its "
        "quire.batch_invariant if it had one"
    )


@contextlib.contextmanager
def _recomputes(step: PresentStep) -> Iterator[None]:
    """A context of delayed scaling that the function enters itself raises CheckpointError where the first pass entered
    it with other scales. step: the one before the first pass."""

    outer = THREAD.recomputes

    def check() -> None:
        if step.next_ended():
            raise _error("quire.autocast", _OTHER_SCALES)
        if outer is not None:
            outer()

    THREAD.recomputes = check
    try:
        yield
    finally:
        THREAD.recomputes = outer


def _checked(function: Callable[..., object]) -> Callable[..., object]:
    """The function, whose layers raise CheckpointError in later calls that would not compute what they compute now."""
    first, step = Reentered(), PresentStep()

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        now = Reentered()
        same = now.same_as(first) and not step.ended()
        with _recomputes(step), contextlib.nullcontext() if same else Reentered(_Differing(first, now, step)):
            return function(*args, **kwargs)

    return checked


def _notice() -> None:
    """Lets every checkpoint of PyTorch, of both kinds, check what it recomputes. Both keep the function to recompute in
    one place, and have no hook for code that is not the caller's; the first pass of the reentrant kind leaves nothing
    else behind, since it runs without gradients. Where it began tells whether it belongs to training."""
    reentrant, frame = pytorchs.CheckpointFunction, pytorchs._CheckpointFrame
    forward, construct = reentrant.forward, frame.__init__

    def noticed_apply(cls: type, *args: object) -> object:
        outer, THREAD.checkpoint_trains = THREAD.checkpoint_trains, trains()
        try:
            return super(reentrant, cls).apply(*args)
        finally:
            THREAD.checkpoint_trains = outer

    @functools.wraps(forward)
    def checked_forward(ctx: object, run_function: Callable[..., object], *others: object) -> object:
        return forward(ctx, _checked(run_function), *others)

    @functools.wraps(construct)
    def checked_construct(self: object, recompute_fn: Callable[..., object], *others: object, **named: object) -> None:
        construct(self, _checked(recompute_fn), *others, **named)

    reentrant.apply, reentrant.forward = classmethod(noticed_apply), staticmethod(checked_forward)
    frame.__init__ = checked_construct


_notice()
