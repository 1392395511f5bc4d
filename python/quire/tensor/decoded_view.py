"""DecodedView: a view of a quantized tensor that has no codes of its own, such as a transpose or some columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from quire.tensor.window import Window


class DecodedView(torch.Tensor):
    """A view of a QuantizedTensor that is read as decoded values.

    PyTorch's operators read the values that the QuantizedTensor has at that time. Views of a DecodedView are
    DecodedViews. Operators that write to it compute on the master or the decoded values of the QuantizedTensor, and
    quantize all of it again. Copies (clone, deepcopy, pickles) are plain tensors.
    """

    window: Window
    #: What PyTorch's operators do with it; operators.py puts it here.
    run_operator: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

    @staticmethod
    def __new__(cls, window: Window) -> DecodedView:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            window.size,
            strides=window.stride,
            storage_offset=window.offset,
            dtype=window.dtype,
            device=window.base.device,
        )
        self.window = window
        return self

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.run_operator(operator, args, kwargs or {})

    @property
    def base(self) -> torch.Tensor:
        """The QuantizedTensor."""
        return self.window.base

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        at = self.window
        return ["base"], (at.dtype, at.size, at.stride, at.offset)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], metadata: tuple[Any, ...], size: Sequence[int], stride: Sequence[int]
    ) -> DecodedView:
        dtype, _, _, offset = metadata
        return DecodedView(Window(inner["base"], dtype, size, stride, offset))

    @torch.no_grad()  # the gradient passes through the view, which autograd knows
    def read(self) -> torch.Tensor:
        """The decoded values, which are decoded anew: nothing tells whether somebody wrote to the codes meanwhile."""
        return self.window.of(self.window.base.dequantize())

    def _plain(self) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """The decoded values, read-only: a write to them would not reach the quantized tensor."""
        array = self._plain().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The decoded values as Python numbers."""
        return self._plain().tolist()

    def data_ptr(self) -> NoReturn:
        raise self._no_memory("data_ptr")

    def share_memory_(self) -> NoReturn:
        raise self._no_memory("share_memory_")

    def apply_(self, function: Any) -> NoReturn:
        raise self._no_memory("apply_")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._no_memory("__dlpack__ (from_dlpack)")

    def _no_memory(self, what: str) -> TypeError:
        return TypeError(
            f"{what}: this is a view of a QuantizedTensor ({self.base.spec}, shape {list(self.base.shape)}), whose "
            "values are not in memory; use clone() for a plain tensor"
        )

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"DecodedView({self._plain()}, of={self.base})"
