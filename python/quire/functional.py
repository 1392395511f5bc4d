"""The operators as plain functions of tensors and texts."""

import torch

from quire.tensor import QuantizedTensor, QuantSpec, named_buffers


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    *,
    sr_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x w^T + bias with the operands of its three products quantized as `recipe` says (numerics.md 6.1).

    x [*, K], w [N, K], bias [N]: each float32, float16 or bfloat16 -> y [*, N] in `dtype`. Differentiable once.
    recipe: "x=SPEC,w=SPEC,dy=SPEC". sr_state: int64 [2] {seed, counter}, needed for gradients if dy rounds
    stochastically; backward adds 1 to the counter (numerics.md 0.11). Raises RuntimeError if anything does not fit.
    """
    return torch.ops.quire.linear(x, w, bias, recipe, dtype, sr_state)


def quantize(
    x: torch.Tensor,
    spec: QuantSpec | str,
    rowwise: bool = True,
    columnwise: bool = False,
    seed: int | None = None,
    *,
    offset: int = 0,
    scale: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Codes, scales and amaxes of x under `spec` (numerics.md 1-5).

    x: float32, float16 or bfloat16, rank >= 1, any sizes and strides.
    rowwise, columnwise: along which dimension blocks run, K or M; both give both from one pass.
    seed, offset: 64-bit numbers, signed or unsigned, of the random stream (numerics.md 0.11); both directions draw from
        it. A spec that rounds stochastically needs a seed.
    scale: float32 [1], multiplies x before the cast instead of a scale from x's own amax; fp8_tensor only
        (numerics.md 1.5).

    Not differentiable. Raises ValueError for a wrong spec, a missing seed or one out of range, RuntimeError for a wrong
    x or scale.
    """
    spec = spec if isinstance(spec, QuantSpec) else QuantSpec(spec)
    if spec.stochastic and seed is None:
        raise ValueError(f"quantize: {spec} rounds stochastically and needs a seed; pass seed= an int")
    results = torch.ops.quire.quantize(
        x, spec.text, rowwise, columnwise, signed64(seed or 0, "seed"), signed64(offset, "offset"), scale
    )
    return QuantizedTensor(spec, x.shape, x.dtype, **named_buffers(results, rowwise, columnwise))


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """q.dequantize(dtype)."""
    return q.dequantize(dtype)


def signed64(value: int, name: str) -> int:
    """The signed integer of the same 64 bits; operators take no others. Raises ValueError out of range."""
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must fit into 64 bits, -2**63 <= {name} < 2**64; got {value}")
    return value - 2**64 if value >= 2**63 else value
