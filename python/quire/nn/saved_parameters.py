"""State dicts of torch.distributed.checkpoint.state_dict with entries that torch.distributed.checkpoint saves whole and
without a class: buffers of quantized weights, and pieces of weights that a layer shards by itself."""

from collections.abc import Mapping

import torch

from quire.distributed.pieces import PiecesOfTensor, PlainPart
from quire.nn.own_parts import Division
from quire.tensor import QuantizedTensor

#: What wraps modules, in names of parameters; PyTorch's get_model_state_dict leaves them out too.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def names_of_modules(model: torch.nn.Module) -> dict[str, str]:
    """Name of each module in named_modules() -> its name in state dicts, which have no wrappers."""
    found = {}
    for name, _ in model.named_modules():
        outer, _, last = name.rpartition(".")
        wrapped = bool(name) and (last in _WRAPPERS or _is_data_parallel(model.get_submodule(outer)))
        found[name] = found[outer] if wrapped else ".".join(filter(None, (found.get(outer, ""), last)))
    return found


def _is_data_parallel(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def divided_parameters(model: torch.nn.Module) -> dict[str, Division]:
    """Name in state dicts -> how it is sharded, of each of ProductModule.own_parts()."""
    names, found = names_of_modules(model), {}
    for name, module in model.named_modules():
        if hasattr(module, "own_parts"):
            found |= {".".join(filter(None, (names[name], own))): p for own, p in module.own_parts().items()}
    return found


def save_model(state: Mapping[str, object], divided: Mapping[str, Division]) -> dict[str, object]:
    """Of a model's state dict. A quantized weight becomes an entry for each buffer, with its spec in the name:
    "0.weight.mxfp8:nan.rowwise_data". All share memory with the parameters."""
    found = {}
    for name, value in state.items():
        if isinstance(value, QuantizedTensor):
            found |= {key: value.named()[buffer] for buffer, key in _buffer_keys(name, value).items()}
        elif name in divided:
            found[name] = divided[name].pieces(_plain(value))
        else:
            found[name] = value
    return found


def load_model(saved: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """A model's state dict, of what save_model() gave. own: the present one, for what is quantized. Raises ValueError
    if an entry of a quantized weight is missing."""
    found = dict(saved)
    for name, value in own.items():
        if isinstance(value, QuantizedTensor):
            keys = _buffer_keys(name, value)
            if missing := [key for key in keys.values() if key not in saved]:
                raise ValueError(
                    f"TrainingState: the state has no {missing[0]!r}; make the model with the recipe of its "
                    "quantized_model_init when it was saved, and with the same directions and masters"
                )
            found[name] = value.with_buffers({buffer: found.pop(key) for buffer, key in keys.items()})
    return {name: _part(value) for name, value in found.items()}


def save_optimizer(
    state: Mapping[str, object], divided: Mapping[str, Division], shapes: Mapping[str, torch.Size]
) -> dict[str, object]:
    """Of an optimizer's state dict. shapes: of the sharded parameters: what has the same shape is sharded too."""
    each = {
        name: {
            key: divided[name].pieces(value)
            if name in divided and isinstance(value, torch.Tensor) and value.shape == shapes[name]
            else value
            for key, value in values.items()
        }
        for name, values in state.get("state", {}).items()
    }
    return {**state, "state": each}


def load_optimizer(saved: Mapping[str, object]) -> dict[str, object]:
    """An optimizer's state dict, of what save_optimizer() gave."""
    each = {
        name: {key: _part(value) for key, value in values.items()} for name, values in saved.get("state", {}).items()
    }
    return {**saved, "state": each}


def _buffer_keys(name: str, q: QuantizedTensor) -> dict[str, str]:
    return {buffer: f"{name}.{q.spec_text}.{buffer}" for buffer, t in q.named().items() if t is not None}


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.plain() if isinstance(value, PlainPart) else value


def _part(value: object) -> object:
    return value.given if isinstance(value, PiecesOfTensor) else value
