"""Orders of the rows or columns that a gated activation takes: the gate and then the linear part, or both in turn in
blocks, [gate block, linear block, gate block, ...]."""

import torch


def _blocks(what: str, size: int, interleave_size: int) -> int:
    if interleave_size < 1 or size % (2 * interleave_size):
        raise ValueError(
            f"{what}: interleave_size must be at least 1 and the dimension a multiple of twice that, got "
            f"interleave_size={interleave_size} and a dimension of {size}"
        )
    return size // (2 * interleave_size)


def deinterleaved(tensor: torch.Tensor, interleave_size: int, dim: int) -> torch.Tensor:
    """A dimension in blocks by turns -> gate and then linear part."""
    blocks = _blocks("deinterleave_glu_tensor", tensor.shape[dim], interleave_size)
    parts = tensor.unflatten(dim, (blocks, 2, interleave_size))
    first = dim if dim >= 0 else tensor.ndim + dim
    return parts.transpose(first, first + 1).flatten(first, first + 2)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The rows of a weight or bias [2H, *] that has gate and linear part by turns, in blocks of interleave_size -> the
    gate's rows and then the linear part's. Raises ValueError unless 2H is a multiple of 2 interleave_size."""
    return deinterleaved(tensor, interleave_size, 0)


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of deinterleave_glu_tensor()."""
    blocks = _blocks("interleave_glu_tensor", tensor.shape[0], interleave_size)
    return tensor.unflatten(0, (2, blocks, interleave_size)).transpose(0, 1).flatten(0, 2)
