"""What a step does to states (numerics.md 1.6): reduction over ranks, functions of the user, the library's update.

An operator, delayed_update_in_python_, so that a graph may have a step which only Python can do: to the graph it is
one node that writes states, and which rules and functions there are is looked up when it runs.
"""

from collections.abc import Sequence

import torch

from quire.delayed.rules import THREAD, Rule, table_on
from quire.delayed.state import usable_states
from quire.distributed import check_ranks
from quire.distributed.groups import sendable
from quire.loading.float_mode import subnormals_kept
from quire.recipe import DelayedScaling

Tensors = Sequence[torch.Tensor]


def reduces(recipe: DelayedScaling, group: object) -> bool:
    """Whether ranks take the largest amax of any."""
    distributed = torch.distributed
    if not (recipe.reduce_amax and distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(group) > 1


def needs_python(rule: Rule) -> bool:
    """Whether delayed_update_ alone cannot do what the rule says."""
    return rule.recipe is not None and (rule.recipe.unfused or reduces(rule.recipe, rule.group))


def update(history: Tensors, scale: Tensors, amax: Tensors, usage: Tensors) -> None:
    """update_of() states of which only `usage` says under which rules they ran. Raises ValueError for tensors that are
    not those of states; nothing has changed then."""
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

    history, scale, amax: of each state forward, then of each state backward. rules, usage: of each state. All on one
    device.
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
    """Whether PyTorch can compute in place on it: a storage that was freed would end the process."""
    if t.dtype != dtype or t.shape != sizes or t.layout != torch.strided or not t.is_contiguous():
        return False
    return (t.storage_offset() + t.numel()) * t.itemsize <= t.untyped_storage().nbytes()


_library = torch.library.Library("quire", "IMPL")
_library.impl("delayed_update_in_python_", update, "CompositeExplicitAutograd")
_library.impl("delayed_update_in_python_", lambda *_: None, "Meta")
# As of the other operators that change state, versions are not counted up: backward may hold what a step writes.
_library.impl("delayed_update_in_python_", torch.library.fallthrough_kernel, "Autograd")


def rules_read(usage: Tensors) -> list[Rule | None]:
    """The rule of this thread that each state ran under last, or None. Waits for the device."""
    rules = {rule.number: rule for rule in THREAD.rules.values()}
    return [rules.get(number) for number in torch.stack(list(usage))[:, 0].tolist()] if usage else []


def _of_all_ranks(places: Sequence[int], usage: Tensors) -> list[int]:
    """Those of states that ranks reduce. A graph passes tensors alone, so states are known by their memory."""
    own = {state.usage.data_ptr() for state in usable_states() if not state.reduced}
    return [place for place in places if usage[place % len(usage)].data_ptr() not in own]


def _reduced(amaxes: Tensors, group: object) -> list[torch.Tensor]:
    """The maximum of each over the group, by one collective for all."""
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
    """(rows of the history that count, new scale) with functions of the user: the last paragraph of numerics.md 1.6."""
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
