"""Entering an autocast of a delayed recipe, and the step that turns amaxes into scales (numerics.md 1.6, 1.7)."""

import functools
import gc
from collections.abc import Callable, Sequence

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from quire.checks import check_type
from quire.delayed.rules import (
    THREAD,
    Rule,
    ends_a_step,
    in_backward,
    place_tables,
    rule_of,
    scales_are_constants,
    table_on,
    write,
)
from quire.delayed.state import STEPPING, DelayedState, keep_as_other_ranks, usable_states
from quire.distributed import check_ranks
from quire.distributed.groups import name_of, sendable
from quire.loading.deferred import assume_constant_result
from quire.loading.float_mode import subnormals_kept
from quire.recipe import DelayedScaling, Format, Recipe

Tensors = Sequence[torch.Tensor]


# --- what a step does to states: reduction over ranks, functions of the user, the library's update
#
# It is an operator, delayed_update_in_python_, so that a graph may have a step which only Python can do. To the graph
# it is one node that writes states. Which rules and functions there are is looked up when it runs.


def reduces(recipe: DelayedScaling, group: object) -> bool:
    """Whether ranks reduce their amaxes to the largest one."""
    distributed = torch.distributed
    if not (recipe.reduce_amax and distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(group) > 1


def needs_python(rule: Rule) -> bool:
    """Whether the rule needs more than the operator delayed_update_: functions of the user, or a reduction over
    ranks."""
    return rule.recipe is not None and (rule.recipe.unfused or reduces(rule.recipe, rule.group))


def update(history: Tensors, scale: Tensors, amax: Tensors, usage: Tensors) -> None:
    """update_of() for states whose rules are known from `usage` only. Raises ValueError, with nothing changed, for
    tensors that are not tensors of states."""
    _check_states(history, scale, amax, usage)
    rules = rules_read(usage)
    for place, one in enumerate(history):
        rule = rules[place % len(rules)]
        if rule is not None and rule.recipe is not None and len(one) < rule.recipe.amax_history_len:
            raise ValueError(
                f"delayed_update_in_python_: a history of {len(one)} rows is shorter than amax_history_len="
                f"{rule.recipe.amax_history_len} of its recipe; pass the states that ran under it"
            )
    update_of(rules, history, scale, amax, usage)


def update_of(rules: Sequence[Rule | None], history: Tensors, scale: Tensors, amax: Tensors, usage: Tensors) -> None:
    """New histories and scales, in place, of the states that ran under a rule of this thread; the others are left
    alone. Nothing is changed if a function of the user raises.

    history, scale, amax: first the forward tensor of each state, then the backward tensor of each state. rules, usage:
    one for each state. All tensors are on one device.
    """
    largest, unfused, fused = list(amax), [], []
    by_rule: dict[Rule, list[int]] = {}
    for place, rule in enumerate(rules):
        if rule is not None and rule.recipe is not None:
            by_rule.setdefault(rule, []).append(place)
    for rule, own in by_rule.items():
        places = [place + first for first in (0, len(usage)) for place in own]
        shared = _of_all_ranks(places, usage) if reduces(rule.recipe, rule.group) else []
        for place, tensor in zip(shared, _reduced([amax[place] for place in shared], rule.group), strict=True):
            largest[place] = tensor
        if not rule.recipe.unfused:
            fused += own
            continue
        for place in places:
            backward = place >= len(usage)
            try:
                window, new = _unfused(rule.recipe, history[place], scale[place], largest[place], backward)
            except BaseException:
                rule.failed = True
                raise
            unfused.append((place, window, new))
    for place, window, new in unfused:  # nothing has raised
        _roll(history[place], window)
        scale[place].copy_(new)
        amax[place].zero_()
        usage[place % len(usage)][1 + place // len(usage)] = len(window)
    for backward in (False, True) if fused else ():
        written = ([t[place + backward * len(usage)] for place in fused] for t in (history, scale, amax, largest))
        *lists, reduced = written
        own = [usage[place] for place in fused]
        torch.ops.quire.delayed_update_(*lists, own, reduced, table_on(own[0].device), backward)


def _check_states(history: Tensors, scale: Tensors, amax: Tensors, usage: Tensors) -> None:
    counts = [len(each) for each in (history, scale, amax)]
    if counts != [2 * len(usage)] * 3:
        raise ValueError(
            "delayed_update_in_python_: history, scale and amax must have two entries for each of usage, forward and "
            f"backward; got {counts} and {len(usage)}"
        )
    for rows, *each in zip(history, scale, amax, strict=True):
        sizes = rows.shape[1:] if rows.dim() == 2 else None
        if rows.numel() == 0 or not (_is_state(rows, rows.shape) and all(_is_state(one, sizes) for one in each)):
            got = [f"{one.dtype} {list(one.shape)}" for one in (rows, *each)]
            raise ValueError(
                "delayed_update_in_python_: a state must have a history [rows, n], a scale [n] and an amax [n], all "
                f"contiguous float32 with memory; got {', '.join(got)}"
            )
    for one in usage:
        if not _is_state(one, torch.Size([3]), torch.int64):
            raise ValueError(
                "delayed_update_in_python_: usage must be contiguous int64 [3] with memory, got "
                f"{one.dtype} {list(one.shape)}"
            )


def _is_state(t: torch.Tensor, sizes: torch.Size | None, dtype: torch.dtype = torch.float32) -> bool:
    """Whether PyTorch can compute in place on the tensor. A freed storage would end the process."""
    if t.dtype != dtype or t.shape != sizes or t.layout != torch.strided or not t.is_contiguous():
        return False
    return (t.storage_offset() + t.numel()) * t.itemsize <= t.untyped_storage().nbytes()


_library = torch.library.Library("quire", "IMPL")
_library.impl("delayed_update_in_python_", update, "CompositeExplicitAutograd")
_library.impl("delayed_update_in_python_", lambda *_: None, "Meta")
# As for the other operators that change state, versions are not counted: backward may have saved what a step writes.
_library.impl("delayed_update_in_python_", torch.library.fallthrough_kernel, "Autograd")


def rules_read(usage: Tensors) -> list[Rule | None]:
    """The rule of this thread that each state ran under last, or None. Waits for the device."""
    rules = {rule.number: rule for rule in THREAD.rules.values()}
    return [rules.get(number) for number in torch.stack(list(usage))[:, 0].tolist()] if usage else []


def _of_all_ranks(places: Sequence[int], usage: Tensors) -> list[int]:
    """The places of states whose amaxes ranks reduce. A graph passes only tensors, so states are recognised by their
    memory."""
    own = {state.usage.data_ptr() for state in usable_states() if not state.reduced}
    return [place for place in places if usage[place % len(usage)].data_ptr() not in own]


def _reduced(amaxes: Tensors, group: object) -> list[torch.Tensor]:
    """The maximum of each amax over the group, by one collective for all of them."""
    if not amaxes:
        return []
    flat = torch.cat(list(amaxes))
    whole = torch.distributed.group.WORLD if group is None else group
    fields = {"call": "the step of delayed scaling", "states": len(amaxes), "amaxes": len(flat)}
    if check_ranks.enabled():
        check_ranks.check_ranks("DelayedScaling", fields, whole)
    else:
        said = ("DelayedScaling", fields)
        check_ranks.agree(whole, "delayed scaling", (len(flat),), lambda: said, whole, device=flat.device)
    sent = sendable(flat, whole)
    torch.distributed.all_reduce(sent, torch.distributed.ReduceOp.MAX, group)
    return [most.clone() for most in sent.to(flat.device).split([len(amax) for amax in amaxes])]


@subnormals_kept()
def _unfused(
    recipe: DelayedScaling, history: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of the history that are in use, new scale) with functions of the user: the last paragraph of numerics.md
    1.6."""
    window = history[: recipe.amax_history_len].clone()
    window[0] = amax
    if callable(recipe.amax_compute_algo):
        chosen = _checked(recipe.amax_compute_algo(window.clone()), amax, "amax_compute_algo")
    else:
        chosen = window.amax(0) if recipe.amax_compute_algo == "max" else window[0]
    largest = recipe.fp8_format.value[backward]
    if recipe.scaling_factor_compute_algo is not None:
        new = recipe.scaling_factor_compute_algo(chosen, scale.clone(), largest, recipe)
        return window, _checked(new, amax, "scaling_factor_compute_algo").clone()
    new = (largest / chosen) / 2.0**recipe.margin
    new = torch.where((chosen > 0) & chosen.isfinite(), new, scale)
    return window, torch.where(new.isinf(), torch.finfo(torch.float32).max, new)


def _roll(history: torch.Tensor, window: torch.Tensor) -> None:
    """The history of the next step, which collects in row 0."""
    length = len(window)
    history.zero_()
    history[1 : length - 1] = window[2:]
    history[length - 1] = window[0] if length > 1 else 0


def _checked(value: object, like: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        what = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(
            f"DelayedScaling: {name} must return a {like.dtype} tensor of shape {list(like.shape)}, got {what}"
        )
    return value.detach()


# --- entering an autocast


def _activate(text: str, recipe: DelayedScaling, group: object, by_layer: bool = False) -> int:
    """Prepares everything that a step under the recipe needs; returns its row in the table."""
    rule = rule_of(text)
    row = list(THREAD.rules).index(text)
    if rule.recipe is None or recipe.unfused:
        rule.recipe = recipe
        write(rule)
    rule.group, rule.failed, rule.by_layer = group, False, rule.by_layer or by_layer
    THREAD.in_python = any([needs_python(rule) for rule in THREAD.rules.values()])
    if reduces(recipe, group):
        keep_as_other_ranks()
    rows = max(r.recipe.amax_history_len for r in THREAD.rules.values() if r.recipe)
    states = usable_states()
    for state in states:
        state.reserve(rows)
    with temporarily_clear_interpreter_stack():  # a transform of torch.func would wrap what is made
        place_tables({state.usage.device for state in states})
    return row


# A constant of the graph, computed once while tracing, on the real objects: fields, since a recipe that is made within
# the graph is none.
@assume_constant_result
def _activate_while_tracing(text: str, group: object, by_layer: bool, element: str, *fields: object) -> int:
    gc.collect()  # or a layer that nothing refers to any more would be traced, and gone when the graph runs
    margin, *others, override = fields
    recipe = DelayedScaling(margin, Format[element], *others, backward_override=override)
    return _activate(text, recipe, group, by_layer)


# PyTorch's own name of a group may be another one on each rank, and would make graphs of ranks differ.
@assume_constant_result
def _name(group: object) -> str:
    return name_of(group)


def rule_text(recipe: DelayedScaling, group: object) -> str:
    """What identifies the rule of a recipe whose amaxes are reduced over a group, None for all processes."""
    return recipe.rule() + ("" if group is None else f",{_name(group)}")


def enter(recipe: DelayedScaling, group: object) -> Rule | None:
    """quire.autocast calls it when a context with a delayed recipe begins, and leave() when the context ends.

    If it is the outermost such context and gradients are enabled, the previous step ends: all states get new scales
    (numerics.md 1.7).

    Args:
        recipe: the delayed recipe of the context.
        group: the process group over which amaxes are reduced, or None.

    Returns:
        The rule, which forward passes pass to collect(). None where scales are constants: no step ends then.

    Raises:
        TypeError: for another recipe.
    """
    check_type("delayed.enter", DelayedScaling, recipe=recipe)
    if scales_are_constants():
        THREAD.depth += 1
        return None
    rule = _active_rule(recipe, group)
    _begin()
    return rule


def _active_rule(recipe: DelayedScaling, group: object, by_layer: bool = False) -> Rule:
    text = rule_text(recipe, group)
    if torch.compiler.is_compiling():
        fields = (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo)
        fields += (recipe.scaling_factor_compute_algo, recipe.reduce_amax, recipe.backward_override)
        row = _activate_while_tracing(text, group, by_layer, recipe.fp8_format.name, *fields)
    else:
        row = _activate(text, recipe, group, by_layer)
    rule = getattr(THREAD, f"rule{row}")
    if rule.text != text:  # the row is a constant of a graph, and guarded by this
        raise AssertionError("DelayedScaling: the rules of this thread are mixed up; please report it")
    return rule


def _begin() -> None:
    """A context begins; the outermost one ends the previous step."""
    if ends_a_step(0):
        step()
    elif in_backward() and THREAD.recomputes is not None and (THREAD.scales is None or not THREAD.scales.replays):
        THREAD.recomputes()
    THREAD.depth += 1  # last: what raises above has entered nothing


class RulesByLayer:
    """The rules of the layers within an autocast whose recipe differs by layer. Which layers have delayed recipes is
    known when they run: a step ends if an earlier autocast of that kind had such layers.

    group: as for enter(). entered: whether leave() is to be called at the end of the context.
    """

    def __init__(self, group: object) -> None:
        self.group, self._found = group, {}
        self._traced = torch.compiler.is_compiling()
        rules = () if self._traced else [rule for rule in THREAD.rules.values() if rule.by_layer]
        for rule in rules:
            _activate(rule.text, rule.recipe, rule.group)
        self.entered = len(rules) > 0
        if self.entered:
            _begin()

    def of(self, recipe: Recipe) -> Rule | None:
        """That of a layer's recipe; None if it is not delayed, and where scales are constants. Raises
        NotImplementedError if the context began in a compiled function."""
        if not recipe.delayed() or scales_are_constants():
            return None
        if self._traced:
            raise NotImplementedError(
                "autocast: a compiled function does not know which layers have delayed scaling when it enters an "
                "autocast whose recipe differs by layer; enter it outside of the compiled function"
            )
        if torch.compiler.is_compiling():
            return _active_rule(recipe, self.group, by_layer=True)
        text = rule_text(recipe, self.group)
        if text not in self._found:
            new = rule_of(text).recipe is None
            self._found[text] = _active_rule(recipe, self.group, by_layer=True)
            if new and ends_a_step(int(self.entered)):  # of states that came from a checkpoint
                step()
        return self._found[text]


def leave() -> None:
    """Ends the context that enter(), or a RulesByLayer that has `entered`, began."""
    THREAD.depth -= 1


# ---------------------------------------------------------------- the step


def step() -> None:
    """New scales and histories of all states that ran under rules of this thread (numerics.md 1.6).

    Which ones those are is for the operators to see, in `usage`, where it lies: they are given all that may have. Only
    functions of the user and reductions over ranks need to know before. Python knows unless this thread ran graphs,
    which leave no trace in Python: then a step waits for the device once.
    """
    states = usable_states()
    if torch.compiler.is_compiling():
        for own in _by_device(states):
            operator = torch.ops.quire.delayed_update_in_python_ if THREAD.in_python else _update
            _end_step(own, operator)
        return
    THREAD.steps[0] += 1
    ran_graphs = torch.ops.quire.delayed_collections() != THREAD.collections
    if ran_graphs and THREAD.in_python:
        _read_rules(states)
        ran_graphs = False
    # One whose function has raised waits until its recipe is entered again: others go on without it. Not so if ranks
    # reduce, which must all take the same states.
    own_rules = [rule for rule in THREAD.rules.values() if not rule.failed or reduces(rule.recipe, rule.group)]
    for own in _by_device(states if ran_graphs else [state for state in states if state.rule in own_rules]):
        if THREAD.in_python:
            _end_step_in_python(own)
        else:
            with STEPPING:  # another thread may have been given some of them too
                _end_step(own, _update)


def _read_rules(states: list[DelayedState]) -> None:
    """Python then knows under which rules of this thread states ran, in graphs too."""
    THREAD.collections = torch.ops.quire.delayed_collections()
    for own in _by_device(states):
        for state, rule in zip(own, rules_read([state.usage for state in own]), strict=True):
            state.rule = rule or state.rule


def _by_device(states: list[DelayedState]) -> list[list[DelayedState]]:
    found: dict[tuple[str, int | None], list[DelayedState]] = {}
    for state in states:
        device = state.usage.device
        found.setdefault((device.type, device.index), []).append(state)
    return list(found.values())


def _end_step(
    states: list[DelayedState], operator: Callable[[Tensors, Tensors, Tensors, Tensors], None]
) -> list[torch.Tensor]:
    """Of states on one device. Returns the histories: of each forward, then of each backward."""
    traced = torch.compiler.is_compiling()
    for state in () if traced else states:
        state.settle()
    both = [state.direction(backward) for backward in (False, True) for state in states]
    history, scale, amax = ([one[i] for one in both] for i in range(3))
    operator(history, scale, amax, [state.usage for state in states])
    for i, state in enumerate(states):
        if traced:
            state.fwd_scale, state.bwd_scale = scale[i], scale[len(states) + i]
        else:
            state.lend()
    return history


def _update(history: Tensors, scale: Tensors, amax: Tensors, usage: Tensors) -> None:
    """update() of states that ran under rules which the library's update knows."""
    n = len(usage)
    table = table_on(usage[0].device)
    for own, backward in ((slice(None, n), False), (slice(n, None), True)):
        torch.ops.quire.delayed_update_(history[own], scale[own], amax[own], usage, [], table, backward)


def _end_step_in_python(states: list[DelayedState]) -> None:
    """Without the lock: a function of the user, or another rank, may take as long as it likes."""
    operator = functools.partial(update_of, [state.rule for state in states])
    for i, written in enumerate(_end_step(states, operator)):
        states[i % len(states)].keep(written, backward=i >= len(states))
