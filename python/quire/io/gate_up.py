"""The two orders of the rows of gate and up in one matrix: in turn, as in files and models of gpt-oss, or all rows of
the gate first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.tensor import QuantizedTensor


def apart(rows: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Rows gate, up, gate, up along a dimension -> all of the gate, then all of up."""
    first = rows.transpose(0, dim)
    return torch.cat([first[0::2], first[1::2]]).transpose(0, dim).contiguous()


def alternating(rows: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The inverse of apart()."""
    gate, up = rows.chunk(2, dim)
    return torch.stack([gate, up], dim + 1).flatten(dim, dim + 1).contiguous()


def of_weight(move: Callable[[torch.Tensor, int], torch.Tensor], weight: QuantizedTensor) -> QuantizedTensor:
    """apart() or alternating() of the rows of a weight or a stack. Only MXFP4, which has scales of single rows: no file
    has others in turn, and they stay as they are."""
    if weight.spec.family != "mxfp4":
        return weight
    buffers = {name: move(value, weight.dim() - 2) for name, value in weight.buffers().items()}
    return type(weight).from_buffers(buffers, weight.spec_text, tuple(weight.shape), weight.dtype)
