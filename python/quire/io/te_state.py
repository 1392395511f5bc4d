"""States of delayed scaling from checkpoints of TransformerEngine (numerics.md 1.4)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from quire.checks import check_type, describe
from quire.conversion.refit import own_names, plain_name, unwrapped
from quire.delayed import DelayedState
from quire.io.container import CheckpointError
from quire.io.te_file import Inert, load_file, loads
from quire.recipe import DelayedScaling, Format

#: Slots of a matmul: x, w, y and dy, dx.
_SLOTS = {"fwd": 3, "bwd": 2}
_FORMATS = {tuple(one.value): name for name, one in Format.__members__.items()}
_REMEDY = "pass the entry `..._extra_state` of a layer as TransformerEngine saved it"
#: The name that TransformerEngine gives to the entry of a layer.
_SUFFIX = "_extra_state"

State = dict[str, torch.Tensor | str]
Payload = bytes | bytearray | memoryview | torch.Tensor | io.BytesIO


def te_state(payload: Payload) -> State | None:
    """The state of delayed scaling of a Linear or GroupedLinear, from the `_extra_state` that TransformerEngine saved.

    Args:
        payload: bytes of a pickle, or a uint8 tensor of them, or a file of torch.save in a BytesIO (of old versions).
            Nothing that the pickle names is imported or called.

    Returns:
        The state in the form that quire.set_delayed_state accepts for one layer: scale_fwd float32 [3], scale_bwd [2],
            amax_history_fwd [L, 3], amax_history_bwd [L, 2], and "rule", the recipe as text. With E groups, there are E
            numbers in place of each number: all groups of x, then of w, then of y. None if there is no state: the
            payload is empty, or the recipe has no state. A LayerNormMLP has two states: te_states() separates them.

    Raises:
        CheckpointError: for a pickle that names anything but TransformerEngine's recipes and PyTorch's tensors, and for
            tensors that are no such state.
        TypeError: for another payload.
    """
    found = _read(payload)
    return None if found is None else _slots_in_order(found, 1)[0]


def te_states(model: torch.nn.Module, state_dict: Mapping[str, Any]) -> dict[str, State]:
    """The states of all layers of a model, for quire.set_delayed_state(model, ...).

    Args:
        model: the model of quire whose layers get the states. torch.compile or DistributedDataParallel may wrap it.
        state_dict: of the same model in TransformerEngine. Only its entries `NAME._extra_state` are read.

    Returns:
        The state of each layer that has one, by the name of the layer.

    Raises:
        CheckpointError: as te_state(), and if a state has another number of matmuls than the layer.
        ValueError: if an entry with a state belongs to no layer of the model.
        TypeError: for arguments of a wrong type, also for names in state_dict that are no texts.
    """
    check_type("te_states", torch.nn.Module, model=model)
    check_type("te_states", Mapping, state_dict=state_dict)
    for name in state_dict:
        check_type("te_states", str, **{"a key of state_dict": name})
    layers = _layers(model)
    names = [*layers, *(name for name, _ in unwrapped(model).named_parameters())]
    plain, states = own_names([*state_dict], names), {}
    for name, payload in state_dict.items():
        if not (name == _SUFFIX or name.endswith(f".{_SUFFIX}")) or payload is None:
            continue
        found = _read(payload)
        if found is None:
            continue
        if plain[name] not in layers:
            raise ValueError(
                f"te_states: {name!r} has a state of delayed scaling, and the model has no such layer; its layers are "
                f"{', '.join(repr(prefix) for prefix, _ in layers.values()) or 'none'}"
            )
        prefix, own = layers[plain[name]]
        for (attribute, state), value in zip(own.items(), _slots_in_order(found, len(own)), strict=True):
            slots = len(value["scale_fwd"])
            if slots != _SLOTS["fwd"] * state.groups:
                raise CheckpointError(
                    f"the state has {slots} forward slots, the layer {_SLOTS['fwd'] * state.groups}",
                    "make the model that was saved",
                    tensor=name,
                )
            states[f"{prefix}.{attribute}" if prefix else attribute] = value
    return states


def _layers(model: torch.nn.Module) -> dict[str, tuple[str, dict[str, DelayedState]]]:
    """Name of the entry of a layer, without the names of what wraps the model or its modules -> the layer's name, for
    quire.set_delayed_state, and its states."""
    inner, found = unwrapped(model), {}
    outer = next(f"{prefix}." for prefix, module in model.named_modules() if module is inner)
    for prefix, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if isinstance(value, DelayedState)}
        if own:
            path = plain_name(f"{prefix}.".removeprefix(outer).rstrip("."))
            found[f"{path}.{_SUFFIX}" if path else _SUFFIX] = prefix, own
    return found


def _read(payload: Payload) -> dict[str, Any] | None:
    """The tensors and the rule, in the order of the file; None if there is no state."""
    if isinstance(payload, io.BytesIO):
        value = load_file(io.BytesIO(payload.getvalue()))
    else:
        if isinstance(payload, torch.Tensor):
            if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.is_meta:
                raise TypeError(f"te_state: expected bytes or a uint8 tensor of one dimension, got {describe(payload)}")
            payload = payload.detach().cpu().numpy().tobytes()
        if not isinstance(payload, bytes | bytearray | memoryview):
            raise TypeError(f"te_state: expected bytes or a uint8 tensor of one dimension, got {describe(payload)}")
        data = bytes(payload)
        if not data:
            return None
        value = loads(data)
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise CheckpointError(f"the extra state must be a dict, got {type(value).__name__}", _REMEDY)
    present = [key for key in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd") if key in value]
    if not present:
        return None
    found = {f"{kind}_{way}": _tensor(value, f"{kind}_{way}") for way in _SLOTS for kind in ("scale", "amax_history")}
    for way, slots in _SLOTS.items():
        scale, history = found[f"scale_{way}"], found[f"amax_history_{way}"]
        if scale.dim() != 1 or history.dim() != 2 or len(history) == 0 or history.shape[1] != len(scale):
            raise CheckpointError(
                f"scale_{way} must be [slots] and amax_history_{way} [L, slots], got {list(scale.shape)} and "
                f"{list(history.shape)}",
                _REMEDY,
            )
        if len(scale) % slots or not len(scale):
            raise CheckpointError(f"scale_{way} has {len(scale)} slots, a multiple of {slots} is expected", _REMEDY)
    if len(found["scale_fwd"]) // _SLOTS["fwd"] != len(found["scale_bwd"]) // _SLOTS["bwd"]:
        raise CheckpointError(
            f"{len(found['scale_fwd'])} forward and {len(found['scale_bwd'])} backward slots are of different numbers "
            "of matmuls",
            _REMEDY,
        )
    return found | {"rule": _rule(value.get("recipe"), len(found["amax_history_fwd"]))}


def _tensor(value: Mapping[str, Any], name: str) -> torch.Tensor:
    tensor = value.get(name)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        raise CheckpointError(f"{name} must be a float32 tensor, got {describe(tensor)}", _REMEDY)
    return tensor.detach().cpu()


def _rule(recipe: object, length: int) -> str:
    """The text of the recipe in the file. Versions before 2 store none: they have only delayed scaling."""
    if recipe is None:
        return DelayedScaling(amax_history_len=length).rule()
    if not isinstance(recipe, Inert) or not type(recipe).name.endswith((".DelayedScaling", ".CustomRecipe")):
        raise CheckpointError(f"the recipe of a state must be DelayedScaling, got {recipe!r}", _REMEDY)
    said = recipe.state
    fields = {
        name: said[name] for name in ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax") if name in said
    }
    try:
        return DelayedScaling(fp8_format=_format(said.get("fp8_format")), **fields).rule()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the recipe is none that quire has: {error}", "choose a recipe of quire") from error


def _format(value: object) -> Format:
    """A member of the enumeration, which pickles hold by name or by its pair of largest values."""
    if value is None:
        return Format.HYBRID
    key = value.args[0] if isinstance(value, Inert) and len(value.args) == 1 else None
    if isinstance(key, Inert):
        key = key.args
    name = _FORMATS.get(key) if isinstance(key, tuple) and all(type(n) in (int, float) for n in key) else key
    if not isinstance(name, str) or name not in Format.__members__:
        raise CheckpointError(f"fp8_format is none of {', '.join(Format.__members__)}, got {value!r}", _REMEDY)
    return Format[name]


def _slots_in_order(found: Mapping[str, Any], products: int) -> list[State]:
    """A state for each matmul. The file has x, w, y of a matmul side by side, and groups as matmuls; quire has the x of
    all groups first."""
    gemms = len(found["scale_fwd"]) // _SLOTS["fwd"]
    if gemms % products:
        raise CheckpointError(f"a state of {gemms} matmuls is not that of a layer with {products}", _REMEDY)
    states: list[State] = [{"rule": found["rule"]} for _ in range(products)]
    for name in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"):
        value = found[name]
        each = value.reshape(*value.shape[:-1], products, gemms // products, _SLOTS[name[-3:]])
        for product, state in enumerate(states):
            part = each[..., product, :, :]
            state[name] = part.transpose(-1, -2).reshape(*value.shape[:-1], -1).clone()
    return states
