"""Block scales in the order of tensor cores, and in rows (numerics.md 4.5)."""

from __future__ import annotations

import torch


def padded(rows: int, blocks: int) -> tuple[int, int]:
    """The sizes of the padded matrix of scales."""
    return -(-rows // 128) * 128, -(-blocks // 4) * 4


def in_rows(scales: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Swizzled scales of any shape with as many elements as the padded matrix -> [rows, blocks]."""
    lines, columns = padded(rows, blocks)
    tiles = scales.reshape(lines // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(lines, columns)[:rows, :blocks].contiguous()


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """The inverse: [rows, blocks] -> the padded matrix, swizzled, padding 0."""
    lines, columns = padded(*scales.shape)
    whole = torch.zeros(lines, columns, dtype=torch.uint8, device=scales.device)
    whole[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = whole.reshape(lines // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(lines, columns).view(scales.dtype)
