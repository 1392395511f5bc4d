"""Codes of one process's rows of a matrix as bytes for an all-gather, and from the bytes of all processes the buffers
of the whole matrix."""

import functools
import math
from collections.abc import Mapping

import torch

from quire.tensor import BUFFER_NAMES, QuantizedTensor, QuantSpec, TensorProto
from quire.tensor.views import TILES

#: Rows of a block of columnwise codes.
_COLUMNWISE_BLOCKS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "fp8_block": 128}


def rows_of_a_block(spec: QuantSpec) -> int:
    """Codes of parts are codes of the whole if each part has a multiple of so many rows."""
    return max([_COLUMNWISE_BLOCKS.get(spec.family, 1), *[TILES.get(option, 1) for option in spec.options]])


@functools.cache
def _axes(spec_text: str) -> dict[str, int | None]:
    """Buffer -> the axis along which the buffers of parts follow one another; None if all parts have it alike."""
    # Sizes that every block divides.
    part, whole = (
        TensorProto((rows, 512), torch.float32, QuantSpec(spec_text), columnwise=True).buffers() for rows in (512, 1024)
    )
    axes = {}
    for name, (shape, _) in part.items():
        differing = [axis for axis, size in enumerate(shape) if size != whole[name][0][axis]]
        axes[name] = differing[0] if differing else None
    return axes


@torch.compiler.assume_constant_result
def axes_of(spec_text: str, direction: str) -> tuple[int, int, int]:
    """The same of data, scale and amax of a direction, -1 for what all parts have alike or is absent."""
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
