"""Rows that are sent as codes: one row of bytes has the codes and the scales of a row."""

from typing import NamedTuple

import torch

from quire.functional import operand_buffers
from quire.tensor import QuantSpec
from quire.tensor.views import TILES


class Field(NamedTuple):
    """A buffer of a quantized tensor in the bytes of a row."""

    bytes: int
    dtype: torch.dtype


def why_not(spec: str) -> str:
    """Why rows under a spec cannot be quantized where they come from; "" if they can."""
    parsed = QuantSpec(spec)
    if parsed.family == "fp8_tensor" or (parsed.family == "nvfp4" and "row_scaled" not in parsed.options):
        return "has a scale of all rows of an expert"
    if any(option in TILES for option in parsed.options):
        return "has scales that rows share"
    return "rounds stochastically" if parsed.stochastic else ""


def pack(rows: torch.Tensor, spec: str) -> tuple[torch.Tensor, tuple[Field, ...]]:
    """uint8 [rows, bytes] of rows [rows, K], and what the bytes are."""
    data, scale, amax, *_ = operand_buffers(rows, spec, columnwise=False)
    parsed = QuantSpec(spec)
    if parsed.family == "fp8_block":  # whose blocks come first
        scale = scale.t()
    parts = [data, scale if scale.dim() == 2 else scale[:, None]]
    if "row_scaled" in parsed.options:
        parts.append(amax[:, None])
    parts = [_viewed(part, torch.uint8) for part in parts]
    dtypes = (data.dtype, scale.dtype, amax.dtype)
    fields = tuple([Field(part.shape[1], dtype) for part, dtype in zip(parts, dtypes, strict=False)])
    return torch.cat(parts, 1), fields


def unpack(
    payload: torch.Tensor, fields: tuple[Field, ...], spec: str, ends: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The six buffers of rows that are sorted into groups, as grouped_linear() takes them. ends: of groups."""
    parts = payload.split([field.bytes for field in fields], 1)
    data, scale, *amax = [_viewed(part, field.dtype) for part, field in zip(parts, fields, strict=True)]
    if QuantSpec(spec).family == "fp8_block":
        scale = _blocks_first(scale, ends)
    return (data, scale, amax[0].flatten() if amax else None, None, None, None)


def _viewed(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """t.view(dtype), of memory of its own: a row of bytes may begin anywhere, and a column have any stride."""
    return t.contiguous() if t.dtype == dtype else t.clone(memory_format=torch.contiguous_format).view(dtype)


def _blocks_first(scale: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Scales [rows, blocks] as flat memory in which each group has [blocks, rows of the group]."""
    rows, blocks = scale.shape
    begins = torch.cat([ends.new_zeros(1), ends])
    sizes = torch.cat([ends, ends.new_full((1,), rows)]) - begins
    row = torch.arange(rows, dtype=torch.int64, device=ends.device)
    group = torch.searchsorted(ends, row, right=True)  # the last one has what is behind all groups
    first = begins[group]
    block = torch.arange(blocks, dtype=torch.int64, device=ends.device)
    place = (first * blocks + row - first)[:, None] + sizes[group][:, None] * block
    return torch.empty_like(scale.flatten()).scatter_(0, place.flatten(), scale.flatten())
