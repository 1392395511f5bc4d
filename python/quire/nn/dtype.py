"""Dtypes of activations and parameters (numerics.md 6.7)."""

from collections.abc import Iterable

import torch

from quire.checks import describe
from quire.loading.deferred import assume_constant_result
from quire.loading.devices import check_device
from quire.tensor import DTYPES, QuantizedActivation

INSTEAD_OF_SPLITTING = "Use DistributedDataParallel, fully_shard or torch.distributed.tensor.parallel"
# A graph has a guard for each step of torch._C._is_any_autocast_enabled.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_INPUTS = (torch.Tensor, QuantizedActivation)


def check_factory(what: str, device: torch.device | str | int | None, **dtypes: object) -> None:
    """Raises TypeError unless each dtype of parameters is one or None, and for a device that is a dtype; else as
    check_device()."""
    wrong = [(name, value) for name, value in dtypes.items() if not isinstance(value, torch.dtype | None)]
    if isinstance(device, torch.dtype):
        wrong.append(("device", device))
    for name, value in wrong[:1]:
        kind = "a device" if name == "device" else "a torch.dtype"
        raise TypeError(
            f"{what}: {name} must be {kind} or None, got {describe(value)}; params_dtype comes before device, unlike "
            "in torch.nn; pass both by keyword"
        )
    check_device(what, device)


def uses_torch_autocast(x: torch.Tensor | QuantizedActivation) -> bool:
    """Whether torch.autocast is enabled for x's device."""
    if not isinstance(x, _INPUTS):
        raise TypeError(f"quire: the input of a layer must be a tensor, got {describe(x)}; {_remedy(x)}")
    if not is_any_autocast_enabled():  # of one device or another; a fifth of the time of what follows
        return False
    device = x.device.type
    return _knows_autocast(device) and torch.is_autocast_enabled(device)


def _remedy(x: object) -> str:
    if isinstance(x, torch.fx.Proxy):
        return "torch.fx cannot trace it: take torch.export, or a Tracer whose is_leaf_module() is true for the layer"
    return "torch.as_tensor() makes one"


@assume_constant_result  # Dynamo of PyTorch 2.11 cannot look inside
def _knows_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def activation_dtype(x: torch.Tensor | QuantizedActivation) -> torch.dtype:
    """The dtype of torch.autocast if it is enabled for x's device, else the dtype of x."""
    return torch.get_autocast_dtype(x.device.type) if uses_torch_autocast(x) else x.dtype


def check_dtypes(
    layer: torch.nn.Module,
    x: torch.Tensor | QuantizedActivation,
    parameters: Iterable[tuple[str, torch.Tensor | None]],
) -> None:
    """Raises TypeError if torch.autocast is disabled and a named parameter does not have x's dtype."""
    autocast = uses_torch_autocast(x)
    if x.dtype not in DTYPES and not x.is_quantized:  # operators refuse those of PyTorch's quantization
        raise TypeError(
            f"quire.{type(layer).__name__}: x must be float32, float16 or bfloat16, got {x.dtype}; convert it with "
            ".to()"
        )
    if autocast:
        return
    for name, parameter in parameters:
        if parameter is not None and parameter.dtype != x.dtype:
            raise TypeError(
                f"quire.{type(layer).__name__}: outside torch.autocast {name} must have the dtype of x; got x "
                f"{x.dtype} and {name} {parameter.dtype}. Convert one with .to(), or enter torch.autocast"
            )
