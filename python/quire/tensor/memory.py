"""What asks a tensor for its memory, where a quantized one has only that of its buffers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class Memory:
    """Methods of torch.Tensor that would read an address which is not there, and end the process."""

    def share_memory_(self) -> Memory:
        """Moves all that is stored into shared memory; returns self."""
        for tensor in self._tensors():
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all that is stored is in shared memory."""
        return all(tensor.is_shared() for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.named().values() if tensor is not None]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._no_values("__dlpack__ (from_dlpack)")

    def apply_(self, function: Any) -> NoReturn:
        raise self._no_values("apply_")

    def _no_values(self, what: str) -> TypeError:
        return TypeError(
            f"QuantizedTensor.{what}: it stores codes and scales, and no values that could be read in place; use "
            "dequantize(), or one of buffers()"
        )
