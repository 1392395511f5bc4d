"""Entering an autocast of a delayed recipe, and the step that turns amaxes into scales (numerics.md 1.6, 1.7)."""

import functools
import gc
from collections.abc import Callable

import torch

from quire.checks import check_type
from quire.delayed.rules import THREAD, Rule, place, rule_of, table_on, write
from quire.delayed.state import STEPPING, DelayedState, keep_as_other_ranks, usable_states
from quire.delayed.update import needs_python, reduces, rules_read, update_of
from quire.distributed.groups import name_of
from quire.loading.for_dynamo import assume_constant_result, is_exporting
from quire.recipe import DelayedScaling, Format, Recipe


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
    place({state.usage.device for state in states})
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
    (numerics.md 1.7). group: the process group over which amaxes are reduced, or None. Returns the rule, which forward
    passes pass to collect(). During torch.export it returns None, because scales are then constants. Raises TypeError
    for another recipe.
    """
    check_type("delayed.enter", DelayedScaling, recipe=recipe)
    if is_exporting():
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
    if _ends_a_step(0):
        step()
    THREAD.depth += 1  # last: what raises above has entered nothing


def _ends_a_step(depth: int) -> bool:
    """Whether there are no contexts around one within so many. An autocast that a backward pass enters belongs to a
    forward pass that is recomputed."""
    recomputes = not torch.compiler.is_compiling() and torch.ops.quire.in_backward()
    return THREAD.depth == depth and not recomputes and torch.is_grad_enabled()


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
        """That of a layer's recipe; None if it is not delayed, and during torch.export. Raises NotImplementedError if
        the context began in a compiled function."""
        if not recipe.delayed() or is_exporting():
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
            if new and _ends_a_step(int(self.entered)):  # of states that came from a checkpoint
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


Tensors = list[torch.Tensor]


def _end_step(states: list[DelayedState], operator: Callable[[Tensors, Tensors, Tensors, Tensors], None]) -> Tensors:
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
