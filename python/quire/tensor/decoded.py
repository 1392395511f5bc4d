"""Decoding as a function that autograd knows."""

from __future__ import annotations

from typing import Any

import torch


class Decoded(torch.autograd.Function):
    """Values of a QuantizedTensor, whose gradient goes to `source` as through the identity; source is not read."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = source.dtype
        return q.dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.to(ctx.dtype), None, None
