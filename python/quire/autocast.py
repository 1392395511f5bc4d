"""The recipe that layers use: a stack of contexts, one per thread."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from quire.recipe import Recipe, default

P = ParamSpec("P")
R = TypeVar("R")


class _State(threading.local):
    # A subclass with defaults: every thread starts without a recipe, and Dynamo reads and writes its attributes.
    def __init__(self) -> None:
        self.recipe: Recipe | None = None


_STATE = _State()


def active_recipe() -> Recipe | None:
    """The recipe of the innermost autocast of this thread; None if there is none or it is disabled."""
    return _STATE.recipe


class autocast:
    """Within it, quire's layers quantize as the recipe says. A context manager and a decorator.

    enabled: False makes layers compute in high precision, also inside an enabled autocast.
    recipe: a recipe of quire.recipe; None is quire.recipe.default().

    Independent of torch.autocast, which sets the dtype of activations. State is per thread and restored when an
    exception leaves. Inside a compiled function it must be constructed there (`with quire.autocast(...)`) and is
    traced; around one, there is a graph per distinct recipe. With activation checkpointing, let it enclose checkpoint
    and backward: recomputation uses the recipe that is active then.

    Raises TypeError where an argument is of a wrong kind, NotImplementedError for TransformerEngine's options that are
    not available.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        *,
        calibrating: bool = False,
        amax_reduction_group: object = None,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"autocast: enabled must be a bool, got {enabled!r}; a recipe is passed as recipe=")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"autocast: recipe must be a recipe of quire.recipe, got {recipe!r}; "
                "quire.recipe.from_name makes one by name"
            )
        if calibrating or amax_reduction_group is not None:
            raise NotImplementedError(
                f"autocast: calibrating={calibrating!r} and amax_reduction_group={amax_reduction_group!r} belong to "
                "delayed scaling, which is not available in this version. Leave them at their defaults"
            )
        if enabled and recipe is None:
            recipe = default()
        if enabled and recipe.delayed():
            raise NotImplementedError("autocast: layers do not keep the state of DelayedScaling in this version")
        self.recipe = recipe if enabled else None
        self._outer: list[Recipe | None] = []

    def __enter__(self) -> "autocast":
        self._outer.append(_STATE.recipe)
        _STATE.recipe = self.recipe
        return self

    def __exit__(self, *exception: object) -> None:
        _STATE.recipe = self._outer.pop()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        recipe = self.recipe

        # A fresh context per call: calls may run in several threads. No annotations: Dynamo cannot guard on P.
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            with autocast(recipe is not None, recipe=recipe):
                return function(*args, **kwargs)

        return wrapper
