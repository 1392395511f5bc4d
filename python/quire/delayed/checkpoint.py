"""The state of delayed scaling of a model's layers. A checkpoint needs it beside state_dict to continue exactly.

It is not in state_dict, so that checkpoints fit both quire.Linear and torch.nn.Linear.
"""

import re
from collections.abc import Iterator, Mapping

import torch

from quire.checks import check_names, check_type, describe, is_plain, received
from quire.delayed.rules import rule_of
from quire.delayed.state import DelayedState
from quire.recipe import DelayedScaling, Format

#: Kind of tensor -> its slots for one group.
_KINDS = {"scale_fwd": 3, "amax_history_fwd": 3, "scale_bwd": 2, "amax_history_bwd": 2}
#: A rule without functions of the user.
_WITHOUT_FUNCTIONS = re.compile(",(max|most_recent),None,")
#: What quire.delayed.step.rule_text() writes. Names of functions and of groups may be anything.
_RULE = re.compile(rf"[^,]+,({'|'.join(Format.__members__)}),\d+,.+,.+,\w+(,.*)?", re.DOTALL)


def _states(model: torch.nn.Module) -> Iterator[tuple[str, DelayedState]]:
    check_type("delayed_state", torch.nn.Module, model=model)
    for prefix, module in model.named_modules():
        if hasattr(module, "place_states"):  # a quire.nn.product_module.ProductModule, which is built on this package
            module.place_states()
        for name, value in vars(module).items():
            if isinstance(value, DelayedState):
                yield (f"{prefix}.{name}" if prefix else name), value


def delayed_state(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor | str]]:
    """Name of a state, such as "0.delayed" -> copies of its tensors, for every layer that has run under a delayed
    recipe; empty if none has.

    The tensors are float32: scale_fwd [3] (of x, w and y), scale_bwd [2] (of dy and dx), which multiply values before
    they are rounded (numerics.md 1.5), amax_history_fwd [L, 3] and amax_history_bwd [L, 2]. Row 0 of a history has the
    amaxes that were collected since the last step (numerics.md 1.4). "rule" is the recipe as text. A GroupedLinear with
    E groups has E columns in place of each. torch.save and torch.load(weights_only=True) accept the result.

    Args:
        model: a model with layers of quire.
    """
    return {name: _read(state) for name, state in _states(model) if state.rule_text()}


def _read(state: DelayedState) -> dict[str, torch.Tensor | str]:
    state.settle()
    found: dict[str, torch.Tensor | str] = {"rule": state.rule_text()}
    for direction, rows in zip(("fwd", "bwd"), state.usage[1:].tolist(), strict=True):
        scale, amax, history = (getattr(state, f"{direction}_{kind}") for kind in ("newest", "amax", "history"))
        older = amax.new_zeros(0, len(amax)) if history is None else history[1 : max(rows, 1)]
        found[f"scale_{direction}"] = scale.clone()
        found[f"amax_history_{direction}"] = torch.cat([amax[None], older])
    return found


def set_delayed_state(model: torch.nn.Module, state: Mapping[str, Mapping[str, torch.Tensor | str]]) -> None:
    """Restores the result of delayed_state(), on the present devices of the layers. Layers that it does not name get a
    new state. The thread that calls this function must be the one that trains.

    Args:
        model: the same model, or one with layers of the same names.
        state: the result of `delayed_state`.

    Raises:
        TypeError: for a model or a state of another type.
        ValueError: if the model has no layer of that name, or if a value does not fit: a scale must be finite and > 0,
            and an amax must not be negative or NaN (it is inf after an overflow).
        RuntimeError: if the state has more different rules than a thread can have. After each of these errors the
            state of the model is unchanged.
    """
    what, remedy = "set_delayed_state", "pass what quire.delayed_state gave for this model"
    check_type(what, torch.nn.Module, model=model)
    check_type(what, Mapping, state=state)
    own = dict(_states(model))
    check_names(what, remedy, state, own)
    for name, value in state.items():
        check_state(what, remedy, name, value, own[name])
    for name, value in state.items():
        if own[name].usable:
            rule_of(value["rule"])  # which raises the RuntimeError before anything is written
    for name, target in own.items():
        if target.usable:
            _write(target, state.get(name))


def check_state(what: str, remedy: str, name: str, value: Mapping[str, object], own: DelayedState) -> None:
    """Raises ValueError unless a value of delayed_state() fits a layer's state. what: the operation that takes it."""
    if not isinstance(value, Mapping) or value.keys() != {"rule", *_KINDS} or not isinstance(value["rule"], str):
        raise ValueError(
            f"{what}: the state of {name!r} must be a dict of 'rule', a str, and {', '.join(_KINDS)}; "
            f"got {list(value) if isinstance(value, Mapping) else describe(value)}; {remedy}"
        )
    if not _RULE.fullmatch(value["rule"]):
        raise ValueError(
            f"{what}: rule of {name!r} must be the text of a DelayedScaling, such as {DelayedScaling().rule()!r}; got "
            f"{value['rule']!r}; {remedy}"
        )
    for kind in _KINDS:
        if problem := _problem(kind, value[kind], own, by_functions=_WITHOUT_FUNCTIONS.search(value["rule"]) is None):
            raise ValueError(f"{what}: {kind} of {name!r} {problem}; {remedy}")


def _problem(kind: str, value: object, own: DelayedState, by_functions: bool) -> str | None:
    """Why a value is no tensor of that kind of a layer's state. by_functions: whether functions of the user compute
    scales, which may be 0 or inf of slots that nothing uses."""
    history, slots = kind.startswith("amax_history"), own.groups * _KINDS[kind]
    if (
        not is_plain(value, torch.float32, may_be_meta=not own.usable)
        or value.dim() != 1 + history
        or value.shape[-1] != slots
        or (history and len(value) == 0)
    ):
        shape = f"[L, {slots}] with L > 0" if history else f"[{slots}]"
        return f"must have values and be dense float32 {shape}, got {received(value)}"
    if not own.usable:
        return None  # nothing is written
    lenient = history or by_functions
    wrong = value[~(value >= 0)] if lenient else value[~((value > 0) & value.isfinite())]  # of NaN nothing holds
    rule = "must not be negative or NaN" if lenient else "must be finite and > 0"
    return f"{rule}, got {wrong[0].item()}" if len(wrong) else None


def _write(target: DelayedState, value: Mapping[str, torch.Tensor | str] | None) -> None:
    device = target.usage.device
    target.reset(device)
    # For a new state too, because inputs of compiled graphs must keep their shapes.
    target.reserve(0 if value is None else max(len(value["amax_history_fwd"]), len(value["amax_history_bwd"])))
    if value is None:
        return
    for i, direction in enumerate(("fwd", "bwd"), 1):
        history = value[f"amax_history_{direction}"].to(device)
        getattr(target, f"{direction}_newest").copy_(value[f"scale_{direction}"])
        getattr(target, f"{direction}_amax").copy_(history[0])
        getattr(target, f"{direction}_history")[1 : len(history)] = history[1:]
        target.usage[i] = len(history)
    target.lend()
    target.set_rule(value["rule"])


def padded_state(model: torch.nn.Module, rows: int, rule: str) -> dict[str, dict[str, torch.Tensor]]:
    """Name of a state -> its tensors, in shapes that do not depend on what has run: delayed_state() with histories of
    `rows` rows, and instead of "rule" the numbers of rows in use, `used`, int64 [2]. 0: the layer has not run.

    Raises RuntimeError if a layer has run under another rule, or longer histories.
    """
    found = {}
    for name, state in _states(model):
        ran = state.rule_text()
        value = _read(state) if ran else _new(state)
        used = [len(value[kind]) if ran else 0 for kind in ("amax_history_fwd", "amax_history_bwd")]
        if ran not in ("", rule) or max(used) > rows:
            raise RuntimeError(
                f"TrainingState: {name!r} has run under the delayed scaling {ran!r} (margin, format, amax_history_len, "
                f"amax_compute_algo, scaling_factor_compute_algo, reduce_amax, group), not {rule!r}; pass its recipe, "
                "and its amax_reduction_group if it has one"
            )
        for kind in ("amax_history_fwd", "amax_history_bwd"):
            history = value[kind]
            value[kind] = torch.cat([history, history.new_zeros(rows - len(history), history.shape[1])])
        value["used"] = state.usage.new_tensor(used)
        found[name] = {kind: value[kind] for kind in (*_KINDS, "used")}
    return found


def _new(state: DelayedState) -> dict[str, torch.Tensor]:
    scales = {f"scale_{direction}": getattr(state, f"{direction}_newest") for direction in ("fwd", "bwd")}
    return {kind: torch.ones_like(scale) for kind, scale in scales.items()} | {
        f"amax_history_{kind[-3:]}": scale.new_zeros(0, len(scale)) for kind, scale in scales.items()
    }


def unpadded_state(
    what: str, remedy: str, model: torch.nn.Module, state: Mapping[str, Mapping[str, torch.Tensor]], rule: str
) -> dict[str, dict[str, torch.Tensor | str]]:
    """Converts the result of padded_state() to an argument of set_delayed_state() that it does not refuse for this
    model. Raises ValueError for what is no such result. what: the operation that takes it."""
    found, own = {}, dict(_states(model))
    check_names(what, remedy, state, own, all_of_them=True)
    for name, value in state.items():
        if not isinstance(value, Mapping) or value.keys() != {*_KINDS, "used"}:
            raise ValueError(
                f"{what}: the state of {name!r} must be a dict of {', '.join(_KINDS)} and 'used'; got "
                f"{list(value) if isinstance(value, Mapping) else describe(value)}; {remedy}"
            )
        used = value["used"]
        if not is_plain(used, torch.int64, may_be_meta=not own[name].usable) or tuple(used.shape) != (2,):
            raise ValueError(
                f"{what}: used of {name!r} must have values and be dense int64 [2], got {received(used)}; {remedy}"
            )
        whole = {kind: value[kind] for kind in _KINDS} | {"rule": rule}
        check_state(what, remedy, name, whole, own[name])
        if not own[name].usable:
            continue
        rows = dict(zip(("amax_history_fwd", "amax_history_bwd"), used.tolist(), strict=True))
        if not any(rows.values()):
            continue  # it had not run
        if not all(0 < n <= len(value[kind]) for kind, n in rows.items()):
            raise ValueError(
                f"{what}: used of {name!r} must be the rows in use of its two histories, or 0 of both if it has not "
                f"run; got {used.tolist()} of {[len(value[kind]) for kind in rows]}; {remedy}"
            )
        found[name] = whole | {kind: value[kind][:n] for kind, n in rows.items()}
    if found:
        rule_of(rule)  # which raises if there are too many
    return found
