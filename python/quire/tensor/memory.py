"""What asks a tensor for its memory, where a quantized one has only that of its buffers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class _Nowhere(int):
    """The address 0 of a tensor that has buffers. accelerate finds tied weights in a dict by data_ptr(). If the key of
    all quantized weights were 0, it would put one of them in the place of the others."""

    def __new__(cls, buffer: int) -> _Nowhere:
        self = super().__new__(cls, 0)
        self.buffer = buffer
        return self

    def __eq__(self, other: object) -> bool:
        return self.buffer == other.buffer if isinstance(other, _Nowhere) else other == 0

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.buffer)


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

    def data_ptr(self) -> int:
        """0, by which PyTorch knows tensors without memory of their own. As keys of a dict the numbers of two tensors
        are equal if they share their first buffer."""
        first = self._tensors()[0]
        return _Nowhere(first.data_ptr() if type(first) is torch.Tensor else 0)  # tracers have no addresses

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise self._no_values("numpy")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._no_values("__dlpack__ (from_dlpack)")

    def apply_(self, function: Any) -> NoReturn:
        raise self._no_values("apply_")

    def _no_values(self, what: str) -> TypeError:
        return TypeError(
            f"QuantizedTensor.{what}: it stores codes and scales, and no values that could be read in place; use "
            "dequantize(), or one of buffers()"
        )
