"""Decoding as an autograd function; and a function applied to each value within a list or tuple."""

from __future__ import annotations

from collections.abc import Callable
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


class Carried(torch.autograd.Function):
    """The carrier of a QuantizedTensor, which has that one's gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any) -> torch.Tensor:
        return q.carrier()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """function of a value, or of each in a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)([each(function, item) for item in value])
    return function(value)
