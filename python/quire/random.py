"""The random state of a model's layers, which a checkpoint needs, beside state_dict, to go on exactly."""

from collections.abc import Mapping

import torch

from quire.kinds import check_kind
from quire.nn.product import ProductModule


def _states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    check_kind("rng_state", torch.nn.Module, model=model)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ProductModule):
            found |= {".".join(filter(None, (name, product))): s for product, s in module.sr_states().items()}
    return found


def rng_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Module name -> a copy of its int64 [2] {seed, counter}, for every layer of quire with products ("" is the model).

    A layer with several, such as quire.LayerNormMLP, has a name for each: "mlp.fc1", "mlp.fc2".
    """
    return {name: state.clone() for name, state in _states(model).items()}


def set_rng_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Puts back what rng_state() returned, onto the devices where the modules are now.

    Raises ValueError, and changes nothing, unless `state` names exactly the model's layers and every
    value is an int64 tensor of shape [2].
    """
    check_kind("set_rng_state", Mapping, state=state)
    own = _states(model)
    if missing := sorted(own.keys() - state.keys()):
        raise ValueError(f"set_rng_state: the model has layers that the state has not: {', '.join(map(repr, missing))}")
    if unexpected := sorted(state.keys() - own.keys()):
        raise ValueError(
            f"set_rng_state: the state has layers that the model has not: {', '.join(map(repr, unexpected))}"
        )
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or tuple(value.shape) != (2,):
            what = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"set_rng_state: the state of {name!r} must be an int64 tensor of shape [2], got {what}")
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)
