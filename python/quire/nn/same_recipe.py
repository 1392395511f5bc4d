"""Notices that torch.utils.checkpoint recomputes a forward pass under another recipe, or with other scales."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.utils.checkpoint as pytorchs

from quire.autocast import Reentered
from quire.delayed.forward import PresentStep
from quire.recipe import Recipe


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
        was, text = _text(before, products), _text(now, products)
        if was != text:
            raise _error(what, f"ran under {was}, and the recomputation runs under {text}")
        if now is not None and now.delayed() and self.step.ended():
            raise _error(what, "used scales of delayed scaling that entering quire.autocast has replaced since")
        return now


def _text(recipe: Recipe | None, products: tuple[str, ...]) -> str:
    """What decides about the results of these matmuls of a layer."""
    each = [None if recipe is None else recipe.of_product(product) for product in products]
    texts = ["no recipe" if one is None else f"{one.linear_spec()!r}{' (delayed)' * one.delayed()}" for one in each]
    return texts[0] if len(set(texts)) == 1 else " and ".join(texts)


def _error(what: str, difference: str) -> pytorchs.CheckpointError:
    return pytorchs.CheckpointError(
        f"{what}: torch.utils.checkpoint recomputes a forward pass that {difference}, so gradients would be wrong. Use "
        "quire.checkpoint, or call backward within the quire.autocast of the forward pass"
    )


def _checked(function: Callable[..., object]) -> Callable[..., object]:
    """The function, whose layers raise CheckpointError in later calls that would not compute what they compute now."""
    first, step = Reentered(), PresentStep()

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        now = Reentered()
        if now.same_as(first) and not step.ended():
            return function(*args, **kwargs)
        with Reentered(_Differing(first, now, step)):
            return function(*args, **kwargs)

    return checked


def notice() -> None:
    """Lets every checkpoint of PyTorch, of both kinds, check what it recomputes. Both keep the function to recompute in
    one place, and have no hook for code that is not the caller's; the first pass of the reentrant kind leaves nothing
    else behind, since it runs without gradients."""
    reentrant, frame = pytorchs.CheckpointFunction, pytorchs._CheckpointFrame
    forward, construct = reentrant.forward, frame.__init__

    @functools.wraps(forward)
    def checked_forward(ctx: object, run_function: Callable[..., object], *others: object) -> object:
        return forward(ctx, _checked(run_function), *others)

    @functools.wraps(construct)
    def checked_construct(self: object, recompute_fn: Callable[..., object], *others: object, **named: object) -> None:
        construct(self, _checked(recompute_fn), *others, **named)

    reentrant.forward, frame.__init__ = staticmethod(checked_forward), checked_construct
