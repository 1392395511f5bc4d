"""What a static scale of inputs means under a spec, and the one of the same amax under another (numerics.md 5.12)."""

import functools

import torch

from quire.functional import quantize
from quire.loading.deferred import assume_constant_result
from quire.loading.float_mode import subnormals_kept
from quire.nn.own_context import own_context
from quire.tensor import QuantizedTensor, QuantSpec


def measured(spec: str) -> str:
    """The spec with the scale that each call measures, of one whose scale the layer has (the option `given`)."""
    return ":".join(word for word in spec.split(":") if word != "given")


@functools.cache
def amax_of_one(spec: str) -> int:
    """The amax for which a static scale is 1: the largest code times the largest block scale. spec: its text, with the
    option `given` or without."""
    with own_context(), subnormals_kept():
        q = quantize(torch.ones(1, 1, dtype=torch.float32, device="cpu"), measured(spec), columnwise=False)
        if q.rowwise_scale.dtype == torch.float32:
            return round(1 / float(q.rowwise_scale))
        # For an amax of 1: the value of the code for 1 (index 2) in a block whose scale is 1 (byte 0x38).
        buffers = q.buffers() | {"rowwise_data": torch.full_like(q.rowwise_data, 2)}
        buffers["rowwise_scale"] = torch.full_like(q.rowwise_scale, 0x38)
        one = QuantizedTensor.from_buffers(buffers, q.spec, (1, 1))
        return round(1 / float(one.dequantize()))


@functools.cache
def unit_of(spec: str) -> tuple[str, int]:
    """What a static scale is under a spec: a factor or a divisor of codes, with the amax for which it is 1; or the amax
    itself."""
    options = QuantSpec(spec).options
    if "global=div" in options:
        return "divisor", amax_of_one(spec)
    is_amax = QuantSpec(spec).family == "nvfp4" and "global=mul" not in options
    return ("amax", 1) if is_amax else ("factor", amax_of_one(spec))


@assume_constant_result
def same_unit(one: str, other: str) -> bool:
    """Whether a static scale means the same under two specs."""
    return one == other or unit_of(one) == unit_of(other)


@own_context()
@subnormals_kept()
def scale_of_amax(amax: float, spec: str) -> torch.Tensor:
    """float32 [1], the scale that a layer with an input under `spec`, which has the option `given`, has for an amax."""
    kind, largest = unit_of(spec)
    value = torch.tensor([amax], dtype=torch.float32, device="cpu")
    if kind == "divisor":
        return torch.full_like(value, largest) / value  # PyTorch would round a number's quotient twice
    return value / largest


@own_context()
@subnormals_kept()
def of_same_amax(scale: torch.Tensor, before: str, after: str) -> torch.Tensor:
    """The static scale under the spec `after` that clips inputs beyond the same amax as `scale` under the spec
    `before`: float32 of the same shape, computed in float64. NaN, a scale that nobody has given, stays NaN."""
    if same_unit(before, after):
        return scale
    (kind, largest), (wanted, its) = unit_of(before), unit_of(after)
    value = scale.double()
    amax = largest / value if kind == "divisor" else value * largest
    return (its / amax if wanted == "divisor" else amax / its).float()
