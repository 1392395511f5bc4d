"""How many floating-point operations our matmuls are: for torch.utils.flop_counter, and for overlap_scheduling of
Inductor, which overlaps communication only with operators that have such a formula."""

import math
from collections.abc import Callable
from types import ModuleType

import torch

from quire.loading.when_imported import when_imported

Given = dict[str, object]


def register() -> None:
    """Registers a formula for every operator that multiplies matrices, when somebody imports torch.utils.flop_counter
    (which loads Triton, if there is one). The operators must have been loaded."""
    when_imported("torch.utils.flop_counter", _register)


def _register(flop_counter: ModuleType) -> None:
    for name, multiplications in _MULTIPLICATIONS.items():
        packet = getattr(torch.ops.quire, name)
        formula = _formula(packet.default._schema, multiplications)
        flop_counter.register_flop_formula(packet, get_raw=True)(formula)


def _formula(schema: torch.FunctionSchema, multiplications: Callable[[Given], int]) -> Callable[..., int]:
    names = [argument.name for argument in schema.arguments]

    def flops(*args: object, out_val: object = None, **kwargs: object) -> int:
        return 2 * multiplications(dict(zip(names, args, strict=False)) | kwargs)  # and as many additions

    return flops


def _matrix(weights: object) -> torch.Size:
    """The sizes [N, K] of a weight, of a stack [E, N, K] and of each weight in a list."""
    return (weights if isinstance(weights, torch.Tensor) else weights[0]).shape[-2:]


def _of_forward(given: Given) -> int:
    return given["x"].numel() * _matrix(given["w"])[0]


def _of_backward(given: Given) -> int:
    """needs: a bit each for dx, dw and more that are no matmuls (linear_bwd.h)."""
    return given["dy"].numel() * given["in_features"] * (given["needs"] & 3).bit_count()


def _of_wgrad(given: Given) -> int:
    return given["tokens"] * math.prod(_matrix(given["main_grad"]))


#: Of numbers, by the operator's arguments.
_MULTIPLICATIONS: dict[str, Callable[[Given], int]] = {
    "linear": _of_forward,
    "linear_prequantized": _of_forward,
    "grouped_linear": _of_forward,
    "linear_fwd": lambda given: given["x"].numel() * given["out_features"],
    "nvfp4_linear": lambda given: given["x"].numel() * given["out_features"],
    "linear_bwd": _of_backward,
    "linear_unquantized_bwd": _of_backward,
    "linear_dgrad": lambda given: math.prod(given["shape"]) * given["out_features"],
    "linear_wgrad": lambda given: given["tokens"] * given["out_features"] * given["in_features"],
    "grouped_wgrad_": _of_wgrad,
    "wgrad_": _of_wgrad,
}
