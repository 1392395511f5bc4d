"""Codes of one direction that follow from those of the other: the same numbers in another order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from quire.tensor.spec import QuantSpec

#: Options under which codes of a direction are its own, or in an order of its own.
_OWN = ("4over6", "swizzled", "interleaved")


def other_direction(
    spec: QuantSpec, shape: Sequence[int], buffers: Mapping[str, torch.Tensor | None], wanted: str
) -> dict[str, torch.Tensor | None] | None:
    """Copies of the stored direction's buffers, in the order of the wanted one: what quantizing the original values
    would have given. None where that does not follow: scales of 1 x n blocks, random bits, a Hadamard transform, or
    4over6, which each direction decides for itself (numerics.md 5.8).

    shape: of the tensor. buffers: by name, None where absent."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    if spec.stochastic or spec.hadamard or any(option.split("=")[0] in _OWN for option in spec.options):
        return None
    stored = "columnwise" if wanted == "rowwise" else "rowwise"
    data, scale, amax = (buffers[f"{stored}_{kind}"] for kind in ("data", "scale", "amax"))
    if data is None:
        return None
    lines = (rows, cols) if stored == "rowwise" else (cols, rows)  # of the stored matrix, unless it is untransposed
    sizes = tuple(shape) if wanted == "rowwise" else (cols, rows)
    if spec.family == "fp8_tensor":
        data, scale = data.reshape(lines).t().reshape(sizes), scale.clone()
    elif "128x128" in spec.options:
        data, scale = data.reshape(lines).t().reshape(sizes), scale.t()
    elif "32x32" in spec.options:
        data = data.clone()  # of the tensor's shape in both directions
        scale = _lines(scale[::32], 1, cols) if wanted == "columnwise" else _lines(scale[:, ::32], 0, rows)
    elif "16x16" in spec.options:
        data = _pack(_unpack(data.reshape(lines[0], data.shape[-1]), lines[1]).t())
        data = data.reshape(*shape[:-1], data.shape[-1]) if wanted == "rowwise" else data
        scale = _lines(scale[::16].t(), 0, lines[1], 16)
    else:
        return None
    amax = None if amax is None else amax.clone()
    return {f"{wanted}_data": data.contiguous(), f"{wanted}_scale": scale.contiguous(), f"{wanted}_amax": amax}


def _lines(tiles: torch.Tensor, dim: int, count: int, size: int = 32) -> torch.Tensor:
    """A scale per tile, repeated for each of `count` lines."""
    return tiles.repeat_interleave(size, dim).narrow(dim, 0, count)


def _unpack(data: torch.Tensor, length: int) -> torch.Tensor:
    """Bytes [n, ceil(length / 2)] -> one code a byte [n, length], the even element from the low nibble."""
    return torch.stack((data & 15, data >> 4), -1).flatten(1)[:, :length]


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of _unpack: a line of odd length ends with a zero nibble."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4
