"""Where a view lies in the quantized tensor that it is a view of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Window:
    """base: the QuantizedTensor to which a write to the view goes. dtype, size, stride, offset: of the view in base's
    values, as if these were in memory, in elements of dtype."""

    base: torch.Tensor
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    @classmethod
    def like(cls, base: torch.Tensor, outline: torch.Tensor) -> Window:
        """Where a tensor lies that is a view of a contiguous one of base's shape and dtype."""
        return cls(base, outline.dtype, outline.shape, outline.stride(), outline.storage_offset())

    def outline(self) -> torch.Tensor:
        """A tensor without values for PyTorch to compute further views of."""
        count = self.base.numel() * self.base.dtype.itemsize // self.dtype.itemsize
        memory = torch.empty(count, dtype=self.dtype, device="meta")
        return memory.as_strided(self.size, self.stride, self.offset)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """This view of `values`, a contiguous tensor of base's shape: base's decoded values, or its master."""
        if self.dtype != self.base.dtype:
            if values.dtype != self.base.dtype:
                raise RuntimeError(
                    f"QuantizedTensor: a view in {self.dtype} of a tensor in {self.base.dtype} cannot be written to, "
                    f"since its master is in {values.dtype}; write to a view in the tensor's own dtype"
                )
            values = values.view(-1).view(self.dtype)
        return values.as_strided(self.size, self.stride, self.offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a view has memory of its own. torch.Tensor.__deepcopy__ copies all attributes."""
