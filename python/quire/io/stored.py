"""A layer of a checkpoint as quire holds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.tensor import QuantizedStack, QuantizedTensor
from quire.tensor.origin import Origin


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A quantized weight of a checkpoint, and what belongs to it.

    weight: [N, K], or for experts in one tensor [E, N, K]. It has the codes and scales of the file, in the order of
        the buffers of quire (docs/specs.md).
    input_scale: float32 [1], or [E] for experts: the static scale of the input, as it is stored; None without one. The
        spec of the weight says whether it multiplies or divides (`global=mul`, `global=div`).
    bias: [N], in the dtype of the file, or None.
    origin: the Origin from which it was read, or at which it is to be written.
    """

    weight: QuantizedTensor | QuantizedStack
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    origin: Origin

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return self.weight.shape

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of the weight, as QuantizedTensor.dequantize()."""
        return self.weight.dequantize(dtype)
