"""The buffers of a quantized tensor: their names, and which of them an operator has filled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: What a quantized tensor may dequantize to by default.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: In the order of the operators' results.
BUFFER_NAMES = (
    "rowwise_data",
    "rowwise_scale",
    "rowwise_amax",
    "columnwise_data",
    "columnwise_scale",
    "columnwise_amax",
)


class DataTensors:
    """What has these buffers as attributes."""

    def get_data_tensors(
        self, rowwise_data: bool = True, columnwise_data: bool = True
    ) -> torch.Tensor | None | tuple[torch.Tensor | None, torch.Tensor | None]:
        """The codes, rowwise and columnwise, None for a direction that is not stored. One tensor if only one is asked
        for; None if none is."""
        if rowwise_data and columnwise_data:
            return self.rowwise_data, self.columnwise_data
        if rowwise_data:
            return self.rowwise_data
        return self.columnwise_data if columnwise_data else None


def named_buffers(results: Sequence[torch.Tensor], rowwise: bool, columnwise: bool) -> dict[str, torch.Tensor | None]:
    """Six results of an operator by name; None for a direction not asked for and for an amax that the spec has not."""
    asked = {"rowwise": rowwise, "columnwise": columnwise}
    named = {}
    for name, tensor in zip(BUFFER_NAMES, results, strict=True):
        direction, kind = name.split("_")
        absent = not asked[direction] or (kind == "amax" and tensor.shape[0] == 0)
        named[name] = None if absent else tensor
    return named


def at_least_one(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes as operators take them: a tensor without dimensions is quantized as [1]."""
    return tuple(shape) or (1,)


def as_matrix(t: torch.Tensor) -> torch.Tensor:
    """t as operators take it: with one dimension or more."""
    return t if t.dim() else t.reshape(1)
