"""Dtypes of activations and parameters (numerics.md 6.7)."""

from collections.abc import Iterable

import torch

from quire.checks import describe
from quire.tensor import QuantizedActivation

INSTEAD_OF_SPLITTING = (
    "Use DistributedDataParallel or fully_shard, or torch.distributed.tensor.parallel outside of quire.autocast"
)
_LOCAL = (torch.Tensor, torch.nn.Parameter, type(None))


def uses_torch_autocast(x: torch.Tensor | QuantizedActivation) -> bool:
    """Whether torch.autocast is enabled for x's device."""
    try:
        device = x.device
    except AttributeError:
        raise TypeError(f"quire: the input of a layer must be a tensor, got {describe(x)}") from None
    if not torch._C._is_any_autocast_enabled():  # of one device or another; a fifth of the time of what follows
        return False
    return _knows_autocast(device.type) and torch.is_autocast_enabled(device.type)


@torch.compiler.assume_constant_result  # Dynamo of PyTorch 2.11 cannot look inside
def _knows_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def activation_dtype(x: torch.Tensor | QuantizedActivation) -> torch.dtype:
    """torch.autocast's dtype where that is enabled for x's device, else the dtype of x."""
    return torch.get_autocast_dtype(x.device.type) if uses_torch_autocast(x) else x.dtype


def check_dtypes(
    layer: torch.nn.Module,
    x: torch.Tensor | QuantizedActivation,
    parameters: Iterable[tuple[str, torch.Tensor | None]],
) -> None:
    """Raises TypeError unless torch.autocast is enabled or the named parameters have x's dtype, NotImplementedError
    for a DTensor."""
    for name, tensor in (("x", x), *parameters):
        if type(tensor) not in _LOCAL and hasattr(tensor, "device_mesh"):
            raise NotImplementedError(
                f"quire.{type(layer).__name__}: {name} is split over devices, a DTensor with {tensor.placements}, and "
                f"products of those are not quantized in this version. {INSTEAD_OF_SPLITTING}"
            )
    if uses_torch_autocast(x):
        return
    for name, parameter in parameters:
        if parameter is not None and parameter.dtype != x.dtype:
            raise TypeError(
                f"quire.{type(layer).__name__}: outside torch.autocast {name} must have the dtype of x; got x "
                f"{x.dtype} and {name} {parameter.dtype}. Convert one with .to(), or enter torch.autocast"
            )
