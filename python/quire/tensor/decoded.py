"""Decoding as a function that autograd knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from quire.tensor.quantized import QuantizedTensor


class Decoded(torch.autograd.Function):
    """dequantize() with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = q.dtype
        return q.dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None
