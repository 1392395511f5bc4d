"""Codes of one rank's rows of a matrix as bytes for an all-gather, and from the bytes of all ranks the buffers
of the whole matrix."""

import functools
import math
from collections.abc import Mapping

import torch

from quire.loading.deferred import assume_constant_result
from quire.tensor import BUFFER_NAMES, QuantizedTensor, QuantSpec, TensorProto

#: Options that store lines in tiles: parts cannot be put together along both axes.
_REORDERED = {"swizzled", "interleaved"}
#: No block, and no tile of scales, has more rows or columns.
_LARGEST_BLOCK = 128


def why_not(spec: QuantSpec, rows: int) -> str:
    """Why codes of parts of so many rows are not codes of the whole; "" if they are."""
    if shared := _REORDERED.intersection(spec.options):
        return f"{spec} stores codes or scales of several rows together ({', '.join(sorted(shared))})"
    block = _rows_of_a_block(str(spec))
    return f"codes of {spec} need equal parts of a multiple of {block} rows" if rows % block else ""


@functools.cache
def _rows_of_a_block(spec_text: str) -> int:
    """So many rows have the buffers of one row: of the buffers, the most."""

    def shapes(rows: int) -> list[tuple[int, ...]]:
        return [shape for shape, _ in _sizes(spec_text, rows).values()]

    # Blocks are powers of two. A buffer that one row more than the largest one leaves as it is does not have rows.
    larger = {1 << i: shapes((1 << i) + 1) for i in range(_LARGEST_BLOCK.bit_length())}
    blocks = [
        next((rows for rows, found in larger.items() if found[i] != shape), 1) for i, shape in enumerate(shapes(1))
    ]
    return max(blocks)


def _sizes(spec_text: str, rows: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Buffer -> shape and dtype, of both directions of a matrix whose columns all blocks divide."""
    return TensorProto((rows, 4 * _LARGEST_BLOCK), torch.float32, QuantSpec(spec_text), columnwise=True).buffers()


@functools.cache
def _axes(spec_text: str) -> dict[str, int | None]:
    """Buffer -> the axis along which the buffers of parts follow one another; None if all parts have it alike."""
    part, whole = (_sizes(spec_text, times * _LARGEST_BLOCK) for times in (4, 8))
    axes = {}
    for name, (shape, _) in part.items():
        differing = [axis for axis, size in enumerate(shape) if size != whole[name][0][axis]]
        axes[name] = differing[0] if differing else None
    return axes


@assume_constant_result
def axes_of(spec_text: str, direction: str) -> tuple[int, int, int]:
    """The axes of data, scale and amax of a direction, as _axes() has them; -1 if all parts have the buffer alike or it
    is absent."""
    axes = [_axes(spec_text).get(f"{direction}_{kind}") for kind in ("data", "scale", "amax")]
    return tuple([-1 if axis is None else axis for axis in axes])


def _travelling(spec_text: str, names: Mapping[str, object]) -> list[tuple[str, int]]:
    axes = _axes(spec_text)
    return [(name, axes[name]) for name in BUFFER_NAMES if names.get(name) is not None and axes[name] is not None]


def pack(part: QuantizedTensor) -> torch.Tensor:
    """uint8 [bytes]: the buffers of a part that differ between parts."""
    buffers = part.named()
    pieces = [buffers[name].flatten().view(torch.uint8) for name, _ in _travelling(part.spec_text, buffers)]
    return torch.cat(pieces)


def alike(part: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The buffers that all parts have alike, which pack() leaves out."""
    axes = _axes(part.spec_text)
    return {name: tensor for name, tensor in part.buffers().items() if axes[name] is None}


def unpack(payload: torch.Tensor, parts: int, spec_text: str, whole: Mapping[str, torch.Tensor]) -> None:
    """Writes into the buffers of the whole matrix, by name, what pack() made of each of its parts.

    payload: uint8, the bytes of one part after another's.
    """
    payload, begin = payload.view(parts, -1), 0
    for name, axis in _travelling(spec_text, whole):
        tensor = whole[name]
        if tensor.numel() == 0:
            continue
        split = tensor.unflatten(axis, (parts, tensor.shape[axis] // parts))
        target = split.view(torch.uint8).movedim(axis, 0)
        count = math.prod(target.shape[1:])
        target.copy_(payload[:, begin : begin + count].unflatten(1, target.shape[1:]))
        begin += count
