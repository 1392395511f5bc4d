"""The recipe that layers use, and whether their kernels must be batch invariant: stacks of contexts, one per thread."""

import ctypes
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.utils._contextlib import context_decorator

from quire import delayed
from quire.checks import check_options, check_type
from quire.delayed.step import RulesByLayer
from quire.loading.deferred import assume_constant_result
from quire.recipe import Recipe, as_recipe, default
from quire.recipe.linear_spec import high_precision

P = ParamSpec("P")
R = TypeVar("R")
Rule = delayed.Rule | RulesByLayer | None

#: Under this name PyTorch keeps the attributes of _STATE of a thread. It carries those of the thread that calls
#: backward to autograd's threads, which is the only way from them to that thread.
_CARRIED = "quire.autocast"


def _carry(attributes: dict[str, object]) -> None:
    """Once in a thread."""
    references = sys.getrefcount(attributes)
    torch._C._stash_obj_in_tls(_CARRIED, attributes)
    if sys.getrefcount(attributes) == references:  # PyTorch 2.11 takes none, and gives one back when the thread ends
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(attributes))


@assume_constant_result
def _in_backward() -> bool:
    """Asked by foreign threads alone: always true of autograd's, and of those that a C++ program made hardly ever."""
    return torch._C._current_graph_task_id() != -1


class _State(threading.local):
    # A subclass with defaults: every thread starts without a recipe, and Dynamo reads and writes its attributes.
    def __init__(self) -> None:
        self.inside = False  # of any autocast
        self.recipe: Recipe | None = None
        self.rule: Rule = None
        self.batch_invariant: bool | None = None  # None: as set_batch_invariant() says
        # Autograd's threads of devices are not Python's. What they compute again belongs to the caller of backward.
        self.foreign = isinstance(threading.current_thread(), threading._DummyThread)
        if not self.foreign or not _in_backward():
            _carry(self.__dict__)

    def get(self) -> "_Active":
        return self.inside, self.recipe, self.rule

    def set(self, active: "_Active") -> None:
        self.inside, self.recipe, self.rule = active


class _Process:
    """What holds for threads that are in no context of their own."""

    batch_invariant = False


_Active = tuple[bool, Recipe | None, Rule]
_STATE, _PROCESS = _State(), _Process()


_NOT_TRACED = (
    "quire.autocast: a compiled function that torch.utils.checkpoint computes again in autograd's thread of a device "
    "has the recipe of another thread, which is not traced; use quire.checkpoint instead"
)


def _active() -> _Active:
    return _STATE.get() if _STATE.inside or not _STATE.foreign else _of_caller()


def _of_caller() -> _Active:
    """What is active in the thread that called backward, which waits; nothing if this is no thread of autograd's."""
    if torch.compiler.is_compiling():
        if _in_backward():  # no guard would see that the other thread's recipe has changed
            torch._dynamo.graph_break(msg=_NOT_TRACED)
        return False, None, None
    if not torch._C._is_key_in_tls(_CARRIED):
        return False, None, None
    state = torch._C._get_obj_in_tls(_CARRIED)
    return state["inside"], state["recipe"], state["rule"]


def active_recipe() -> Recipe | None:
    """The recipe of the innermost autocast of this thread; None if there is none or it is disabled. In an autograd
    thread, the recipe of the thread that called backward.
    """
    found = _active()[1]
    return None if found is None else found.in_force()


def recipe_of(layer: torch.nn.Module) -> Recipe | None:
    """The recipe of a layer: outside of any autocast its own, else active_recipe(), or what that one is for it."""
    return active_in(layer)[0]


def is_within_autocast() -> bool:
    """Whether an autocast decides for the layers, one that is disabled too."""
    return _active()[0]


def active_rule() -> Rule:
    """The argument of delayed.collect(), if the innermost autocast of this thread has a delayed recipe and is enabled
    or calibrating; of a recipe that differs by layer, what knows the rule of each; else None."""
    return _active()[2]


def active_in(layer: torch.nn.Module) -> tuple[Recipe | None, Rule]:
    """recipe_of() a layer, and active_rule()."""
    inside, recipe, rule = _active() if _STATE.foreign else (_STATE.inside, _STATE.recipe, _STATE.rule)
    found = recipe if inside else layer.own_recipe
    return found if found is None or not found.by_layer else found.of_layer(layer), rule


def is_batch_invariant_enabled() -> bool:
    """Whether layers compute as within quire.batch_invariant; in autograd's threads, as in backward's caller."""
    own = _batch_invariant_of_caller() if _STATE.foreign else _STATE.batch_invariant
    return _PROCESS.batch_invariant if own is None else own


def _batch_invariant_of_caller() -> bool | None:
    """That of this thread, if it has one, which is none of Python's; else that of the thread that called backward."""
    if _STATE.batch_invariant is not None:
        return _STATE.batch_invariant
    if torch.compiler.is_compiling() or not torch._C._is_key_in_tls(_CARRIED):
        return None
    return torch._C._get_obj_in_tls(_CARRIED)["batch_invariant"]


def set_batch_invariant(enabled: bool) -> None:
    """quire.batch_invariant for all threads of the process, until it is called again, as
    torch.use_deterministic_algorithms does. A context of a thread comes first.

    Args:
        enabled: False is the state at the start.

    Raises:
        TypeError: for anything that is not a bool.
    """
    check_type("set_batch_invariant", bool, enabled=enabled)
    _PROCESS.batch_invariant = enabled


class batch_invariant:
    """A token gets the same bits in every batch. Use it where results must be reproduced, such as the log-probabilities
    of a server in its trainer, or the answer to a prompt whatever else is served with it.

    Within this context layers of quire take only kernels that give a token the bits that it has alone. So y of a
    token does not depend on the other tokens of the batch, on their number, on the token's position among them, or on
    padding; dx depends on them only through the format of dy (docs/invariance.md). It is a context manager and a
    decorator, as torch.inference_mode is. Its state is per thread; quire.set_batch_invariant is the same for the
    process.

    What changes: on a CPU with AMX, NVFP4 has one order of sums for all numbers of tokens. Layers without a recipe, the
    router of quire.MoE and recipes for weights only are multiplied by kernels of quire instead of PyTorch's. On a GPU
    only kernels run that take every number of tokens. A recipe that gives x one scale for all tokens raises
    RuntimeError, which names the alternatives: scales of blocks (MXFP8), of rows (NVFP4BlockScaling with
    row_scaled_activation=True, fp8_row), or static scales (quire.calibrate).

    The choice is an argument of each operator, a part of the text of its recipe. So whatever is captured within the
    context keeps it when it runs outside: a backward pass, a graph of CUDA, a program of torch.export and a package of
    AOTInductor. A function of torch.compile is compiled again when the state has changed.

    It concerns layers of quire. PyTorch's own matmuls, such as those of a torch.nn.Linear that was not converted and of
    attention, are as PyTorch computes them: quire.convert(model, min_features=1) makes them layers of quire, also
    without a recipe. Row layers of tensor parallelism add results of ranks, in an order that the process group chooses:
    from three ranks on enter quire.distributed.exact() too. The capacity of a mixture and an output_spec with one scale
    per tensor depend on all tokens of a call. Within the context layers without a recipe take the dtypes of quire's
    kernels (float32, float16, bfloat16) and have no second derivatives.

    Args:
        enabled: False ends it for the time of the context.

    Raises:
        TypeError: for anything that is not a bool.

    Examples:
        >>> layer, x = quire.Linear(64, 96, recipe="mxfp8"), torch.randn(32, 64)
        >>> with quire.batch_invariant():
        ...     torch.equal(layer(x)[:1], layer(x[:1]))
        True
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(
                f"batch_invariant: enabled must be a bool, got {enabled!r}; a decorator is written with parentheses: "
                "@quire.batch_invariant()"
            )
        self._enabled = enabled
        self._outer: list[bool | None] = []

    def __enter__(self) -> "batch_invariant":
        self._outer.append(_STATE.batch_invariant)
        _STATE.batch_invariant = self._enabled
        return self

    def __exit__(self, *exception: object) -> None:
        _STATE.batch_invariant = self._outer.pop()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        enabled = self._enabled
        return context_decorator(lambda: batch_invariant(enabled), function)  # for each step of a generator too


def check_flags(what: str, option: str, **flags: object) -> None:
    """Raises TypeError unless the flags of an autocast are bools. option: its keyword for a recipe."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"{what}: {name} must be a bool, got {value!r}; a recipe is passed as {option}=, and a decorator is "
                f"written with parentheses: @quire.{what}()"
            )


def _runs_later(function: object) -> bool:
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(kind(function) for kind in kinds)


class autocast:
    """Within this context quire's layers quantize their matmuls under the recipe. This also holds for layers that have
    their own recipe (recipe=, quire.convert). Of nested contexts the innermost one decides. autocast is a context
    manager and a decorator.

    With a delayed recipe, entering the outermost autocast with grad enabled ends the previous step: layers get new
    scales (numerics.md 1.7). With gradient accumulation, enter one autocast around all microbatches of an optimizer
    step. Inside a compiled function the update is a part of the graph, and the states of all layers of the process are
    inputs of the graph. Around a compiled function the update is not in the graph. A recipe can differ by layer
    (quire.te) and be delayed for some layers only. The same rules hold for these layers, with one exception: the
    context must be around compiled functions, not inside.

    quire.autocast is independent of torch.autocast, which sets the dtype of activations. Its state is per thread. It is
    restored if an exception is raised. Inside a compiled function, construct it there (`with quire.autocast(...)`).
    Around a compiled function, there is one graph for each recipe.

    With activation checkpointing use quire.checkpoint. PyTorch's own checkpoint recomputes under the recipe that is
    active during backward. So with it, call backward inside the autocast; elsewhere a layer that would compute another
    forward pass raises torch.utils.checkpoint.CheckpointError. (On an accelerator PyTorch's checkpoint cannot
    recompute a function that is compiled with fullgraph=True: it raises torch._dynamo.exc.Unsupported.)

    Args:
        enabled: False makes layers compute in high precision, also inside an enabled autocast.
        calibrating: with enabled=False and a delayed recipe, layers compute in high precision and collect the amaxes of
            x and w.
        recipe: a recipe of quire.recipe, its name or its text (quire.recipe.as_recipe); None is quire.recipe.default().
            A recipe whose fields can be set (quire.te.common.recipe) is read whenever the context is entered.
        amax_reduction_group: the process group over which a delayed recipe reduces amaxes; None is the default group.
        **unknown: other keywords raise TypeError.

    Raises:
        TypeError: for an unknown keyword, and for a value of the wrong type. The first argument is enabled; a recipe
            goes to recipe=.
        ValueError: for an unknown name or text of a recipe.

    Examples:
        >>> layer = quire.Linear(64, 96)
        >>> with quire.autocast(recipe="nvfp4"):
        ...     y = layer(torch.randn(32, 64))
        >>> y.sum().backward()
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        amax_reduction_group: object = None,
        **unknown: object,
    ) -> None:
        if unknown:
            check_options("autocast", ("enabled", "calibrating", "recipe", "amax_reduction_group"), unknown)
        check_flags("autocast", "recipe", enabled=enabled, calibrating=calibrating)
        if amax_reduction_group is not None and getattr(amax_reduction_group, "group_name", None) is None:
            raise TypeError(
                f"autocast: amax_reduction_group must be a process group or None, got {amax_reduction_group!r}; "
                "torch.distributed.new_group makes one"
            )
        self._given, self._enabled, self._calibrating = recipe, enabled, calibrating
        self._group = amax_reduction_group
        self._outer: list[tuple[_Active, bool]] = []
        self._read()

    def _read(self) -> None:
        recipe = as_recipe("autocast", self._given, by_layer=True)
        if recipe is None and (self._enabled or self._calibrating):
            recipe = default()
        self.recipe = recipe if self._enabled else None
        self._delayed = recipe
        if recipe is not None and not (recipe.delayed() and (self._enabled or self._calibrating)):
            self._delayed = None
        self._by_layer = self.recipe is not None and self.recipe.by_layer
        self._changes = self._given is not None and not isinstance(self._given, Recipe | str)

    def __enter__(self) -> "autocast":
        if self._changes:
            self._read()
        rule, entered = None, self._delayed is not None
        if entered:
            rule = delayed.enter(self._delayed, self._group)
        elif self._by_layer:
            rule = RulesByLayer(self._group)
            entered = rule.entered
        self._outer.append((_STATE.get(), entered))
        _STATE.set((True, self.recipe, rule))
        return self

    def __exit__(self, *exception: object) -> None:
        active, entered = self._outer.pop()
        _STATE.set(active)
        if entered:
            delayed.leave()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if _runs_later(function):
            name = getattr(function, "__qualname__", function)
            raise TypeError(
                f"autocast: {name} is a generator or a coroutine function, and its body runs after the call has "
                "returned; write `with quire.autocast(...)` around the layers in its body"
            )
        enabled, recipe, group = self._enabled, self._given, self._group
        calibrating = self._calibrating

        # A fresh context per call: calls may run in several threads. No annotations: Dynamo cannot guard on P.
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            with autocast(enabled, calibrating, recipe, group):
                return function(*args, **kwargs)

        return wrapper


class Reentered:
    """A context that restores the recipe that was active when the context was created: for a forward pass that backward
    recomputes, possibly in another thread. Unlike autocast it ends no step of delayed scaling.

    recipe: one that is active instead.
    """

    def __init__(self, recipe: Recipe | None = None) -> None:
        self._state = _active() if recipe is None else (True, recipe, active_rule())
        self._batch_invariant = is_batch_invariant_enabled()
        self._outer: list[tuple[_Active, bool, bool | None]] = []

    def __enter__(self) -> "Reentered":
        self._outer.append((_STATE.get(), _STATE.foreign, _STATE.batch_invariant))
        _STATE.set(self._state)
        _STATE.batch_invariant = self._batch_invariant
        _STATE.foreign = False  # also where nothing was active: the caller of backward is not asked
        return self

    def __exit__(self, *exception: object) -> None:
        active, _STATE.foreign, _STATE.batch_invariant = self._outer.pop()
        _STATE.set(active)

    def same_as(self, other: "Reentered") -> bool:
        return self._state == other._state and self._batch_invariant == other._batch_invariant

    def text_of(self, recipe: Recipe | None) -> str:
        """What says how matmuls of a layer under the recipe compute within this context; "" as PyTorch's do."""
        if recipe is None:
            return high_precision(self._batch_invariant)
        return recipe.specs_for(batch_invariant=self._batch_invariant).text

    def active_recipe(self) -> Recipe | None:
        """active_recipe() within this context."""
        with self:
            return active_recipe()

    def recipe_of(self, layer: torch.nn.Module) -> Recipe | None:
        """recipe_of() within this context."""
        with self:
            return recipe_of(layer)


class Outside(Reentered):
    """A context that is outside of every autocast and batch_invariant, wherever it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._state, self._batch_invariant = (False, None, None), False
