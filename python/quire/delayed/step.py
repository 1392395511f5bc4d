"""Entering an autocast of a delayed recipe, and the step that turns amaxes into scales (numerics.md 1.6, 1.7)."""

import gc

import torch

from quire.checks import check_kind
from quire.delayed.rules import THREAD, rule_of
from quire.delayed.state import usable_states
from quire.delayed.update import needs_python, ran_here, update
from quire.recipe import DelayedScaling, Format


def _activate(text: str, recipe: DelayedScaling, group: object) -> int:
    """Prepares everything that a step under the recipe needs; returns its row in the table."""
    rule = rule_of(text)
    row = list(THREAD.rules).index(text)
    if rule.recipe is None or recipe.unfused:
        rule.recipe = recipe
        if not recipe.unfused:
            number, newest = int(rule.number), recipe.amax_compute_algo == "most_recent"
            columns = [number, recipe.amax_history_len, newest, recipe.margin, *recipe.fp8_format.value]
            THREAD.table[row] = torch.tensor(columns, dtype=torch.float64)
    rule.group = group
    THREAD.in_python = any([needs_python(rule) for rule in THREAD.rules.values()])
    rows = max(r.recipe.amax_history_len for r in THREAD.rules.values() if r.recipe)
    for state in usable_states():
        state.reserve(rows)
    return row


# A constant of the graph, computed once while tracing, on the real objects: fields, since a recipe that is made within
# the graph is none.
@torch.compiler.assume_constant_result
def _activate_while_tracing(text: str, group: object, element: str, *fields: object) -> int:
    gc.collect()  # or a layer that nothing refers to any more would be traced, and gone when the graph runs
    margin, *others, override = fields
    return _activate(text, DelayedScaling(margin, Format[element], *others, backward_override=override), group)


def enter(recipe: DelayedScaling, group: object) -> torch.Tensor | None:
    """Called on entering an autocast of a delayed recipe, with leave() on leaving it: ends the last step if this is the
    outermost one and grad is enabled. Returns the number that forward passes pass to collect(); None while exporting,
    when scales are constants."""
    check_kind("delayed.enter", DelayedScaling, recipe=recipe)
    if torch.compiler.is_exporting():
        THREAD.depth += 1
        return None
    text = recipe.rule() + ("" if group is None else f",{group.group_name}")
    if torch.compiler.is_compiling():
        fields = (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo)
        fields += (recipe.scaling_factor_compute_algo, recipe.reduce_amax, recipe.backward_override)
        row = _activate_while_tracing(text, group, recipe.fp8_format.name, *fields)
        outermost = THREAD.depth == 0
    else:
        row = _activate(text, recipe, group)
        # An autocast that a backward pass enters belongs to a forward pass that is recomputed.
        outermost = THREAD.depth == 0 and not torch.ops.quire.in_backward()
    rule = getattr(THREAD, f"rule{row}")
    if rule.text != text:  # the row is a constant of a graph, and guarded by this
        raise AssertionError("DelayedScaling: the rules of this thread are mixed up; please report it")
    if outermost and torch.is_grad_enabled():
        step()
    THREAD.depth += 1  # last: what raises above has entered nothing
    return rule.number


def leave() -> None:
    """The counterpart of enter()."""
    THREAD.depth -= 1


# ---------------------------------------------------------------- the step


def step() -> None:
    """New scales and histories of all states that ran under rules of this thread (numerics.md 1.6).

    In a graph, which cannot ask who ran, of all states in the process, by the operators' own look at `usage`.
    """
    traced, states = torch.compiler.is_compiling(), usable_states()
    if not traced:
        states = ran_here(states)
    if not states:
        return
    usage = [state.usage for state in states]
    both = [[state.direction(backward) for state in states] for backward in (False, True)]
    history, scale, amax = ([one[i] for entries in both for one in entries] for i in range(3))
    fresh = [tensor.clone() for tensor in scale]
    if not traced:
        update(history, fresh, amax, usage)
        for i, tensor in enumerate(history):
            states[i % len(states)].keep(tensor, backward=i >= len(states))
    elif THREAD.in_python:
        torch.ops.quire.delayed_update_in_python_(history, fresh, amax, usage)
    else:
        n = len(states)
        for own, backward in ((slice(None, n), False), (slice(n, None), True)):
            lists = [tensors[own] for tensors in (history, fresh, amax)]
            torch.ops.quire.delayed_update_(*lists, usage, [], THREAD.table, backward)
    for i, tensor in enumerate(fresh):
        prefix = "fwd" if i < len(states) else "bwd"
        setattr(states[i % len(states)], f"{prefix}_scale", tensor)
