"""Entering an autocast of a delayed recipe, and the step that turns amaxes into scales (numerics.md 1.6, 1.7)."""

import gc

import torch

from quire.delayed.rules import THREAD, Rule, rule_of
from quire.delayed.state import DelayedState, usable_states
from quire.recipe import DelayedScaling, Format

_DIRECTIONS = (("fwd", False), ("bwd", True))


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
    rows = max(r.recipe.amax_history_len for r in THREAD.rules.values() if r.recipe)
    for state in usable_states():
        state.reserve(rows)
    return row


# A constant of the graph, computed once while tracing, on the real objects.
@torch.compiler.assume_constant_result
def _activate_while_tracing(text: str, margin: int, element: str, length: int, algorithm: str) -> int:
    gc.collect()  # or a layer that nothing refers to any more would be traced, and gone when the graph runs
    return _activate(text, DelayedScaling(margin, Format[element], length, algorithm), None)


def _check_traceable(recipe: DelayedScaling, group: object) -> None:
    why = ""
    if recipe.unfused:
        why = "amax_compute_algo or scaling_factor_compute_algo is a function"
    elif _reduces(recipe, group):
        why = "reduce_amax=True communicates between ranks"
    if why:
        raise NotImplementedError(
            f"DelayedScaling: entering autocast inside a compiled function updates the scales there, but {why}. Enter "
            "autocast around the compiled function"
        )


def enter(recipe: DelayedScaling, group: object) -> torch.Tensor | None:
    """Called on entering an autocast of a delayed recipe, with leave() on leaving it: ends the last step if this is the
    outermost one and grad is enabled. Returns the number that forward passes pass to collect(); None while exporting,
    when scales are constants."""
    if torch.compiler.is_exporting():
        THREAD.depth += 1
        return None
    text = recipe.rule() + ("" if group is None else f",{group.group_name}")
    if torch.compiler.is_compiling():
        _check_traceable(recipe, group)
        row = _activate_while_tracing(
            text, recipe.margin, recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo
        )
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

    In a graph, which cannot ask who ran, of all states in the process, by the operator's own look at `usage`.
    """
    states, reduced = usable_states(), {}
    if not torch.compiler.is_compiling():
        by_rule = _states_by_rule(states)
        states = []
        for rule, own in by_rule.items():
            if _reduces(rule.recipe, rule.group):
                _reduce(own, rule.group, reduced)
            if rule.recipe.unfused:
                for state in own:
                    _unfused_update(state, rule.recipe, reduced)
            else:
                states += own
    if not states:
        return
    for prefix, backward in _DIRECTIONS:
        history, scale, amax = ([s.direction(backward)[i] for s in states] for i in range(3))
        fresh = [tensor.clone() for tensor in scale]
        others = [reduced.get(id(tensor), tensor) for tensor in amax] if reduced else []
        usage = [state.usage for state in states]
        torch.ops.quire.delayed_update_(history, fresh, amax, usage, others, THREAD.table, backward)
        for state, tensor in zip(states, fresh, strict=True):
            setattr(state, f"{prefix}_scale", tensor)


def _states_by_rule(states: list[DelayedState]) -> dict[Rule, list[DelayedState]]:
    rules = {int(rule.number): rule for rule in THREAD.rules.values() if rule.recipe is not None}
    found: dict[Rule, list[DelayedState]] = {}
    for state in states:
        rule = rules.get(int(state.usage[0]))
        if rule is not None:
            found.setdefault(rule, []).append(state)
    return found


def _reduces(recipe: DelayedScaling, group: object) -> bool:
    distributed = torch.distributed
    if not (recipe.reduce_amax and distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(group) > 1


def _reduce(states: list[DelayedState], group: object, reduced: dict[int, torch.Tensor]) -> None:
    """Adds to `reduced`, by id of the amax tensor, the maximum over the group: one collective for all states."""
    amaxes = [state.direction(backward)[2] for state in states for _, backward in _DIRECTIONS]
    flat = torch.cat(amaxes)
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group)
    for amax, most in zip(amaxes, flat.split([len(amax) for amax in amaxes]), strict=True):
        reduced[id(amax)] = most.clone()


def _unfused_update(state: DelayedState, recipe: DelayedScaling, reduced: dict[int, torch.Tensor]) -> None:
    """The update with functions of the user: the last paragraph of numerics.md 1.6."""
    length, updates = recipe.amax_history_len, []
    for _, backward in _DIRECTIONS:
        history, scale, amax = state.direction(backward)
        window = history[:length].clone()
        window[0] = reduced.get(id(amax), amax)
        if callable(recipe.amax_compute_algo):
            chosen = _checked(recipe.amax_compute_algo(window.clone()), amax, "amax_compute_algo")
        else:
            chosen = window.amax(0) if recipe.amax_compute_algo == "max" else window[0]
        updates.append((window, _unfused_scale(recipe, chosen, scale, recipe.fp8_format.value[backward])))
    for (prefix, backward), (window, new) in zip(_DIRECTIONS, updates, strict=True):  # nothing has raised
        history, _, amax = state.direction(backward)
        amax.zero_()
        history.zero_()
        history[1 : length - 1] = window[2:]
        history[length - 1] = window[0] if length > 1 else 0
        setattr(state, f"{prefix}_scale", new)
    state.usage[1:] = length


def _unfused_scale(recipe: DelayedScaling, amax: torch.Tensor, scale: torch.Tensor, largest: float) -> torch.Tensor:
    if recipe.scaling_factor_compute_algo is not None:
        new = recipe.scaling_factor_compute_algo(amax, scale.clone(), largest, recipe)
        return _checked(new, amax, "scaling_factor_compute_algo").clone()
    new = (largest / amax) / 2.0**recipe.margin
    new = torch.where((amax > 0) & amax.isfinite(), new, scale)
    return torch.where(new.isinf(), torch.finfo(torch.float32).max, new)


def _checked(value: object, like: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        what = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(
            f"DelayedScaling: {name} must return a {like.dtype} tensor of shape {list(like.shape)}, got {what}"
        )
    return value.detach()
