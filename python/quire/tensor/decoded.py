"""Decoding as a function that autograd knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from quire.tensor.quantized import QuantizedTensor


class Decoded(torch.autograd.Function):
    """q.dequantize(), whose gradient goes to `source` as through the identity; source is not read."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = source.dtype
        return q.dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.to(ctx.dtype), None, None
