"""Decoded values of a quantized tensor: with a gradient (decoded), and as a view that has no codes (DecodedView)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

#: The remedy where a tool would store decoded values in a file and lose the codes.
ON_DISK = (
    "Offloading to disk (accelerate's disk_offload, or 'disk' in a device_map) stores decoded values: offload "
    "quantized weights to the CPU, or from a file by state_dict=torch.load(path, mmap=True) (docs/integrations.md)"
)


class _Decoded(torch.autograd.Function):
    """decoded(), outside of transforms of torch.func."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = source.dtype
        return q.dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.to(ctx.dtype), None, None


class _Carried(torch.autograd.Function):
    """carried(), outside of transforms of torch.func."""

    @staticmethod
    def forward(ctx: Any, q: Any) -> torch.Tensor:
        return q.carrier()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


# Transforms take only functions with a setup_context, whose calls take 20 us longer.
class _DecodedInTransform(_Decoded):
    @staticmethod
    def forward(source: torch.Tensor, q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return q.dequantize(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.dtype], output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> NoReturn:
        """Codes that vmap has batched are in buffers of q, where PyTorch does not unwrap them."""
        raise RuntimeError(
            "quire: dequantize() with a gradient cannot be batched by torch.func.vmap; use a loop over the samples, or "
            "give the quantized tensor to a layer of quire, which can"
        )


class _CarriedInTransform(_Carried):
    generate_vmap_rule = True

    @staticmethod
    def forward(q: Any) -> torch.Tensor:
        return q.carrier()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any], output: torch.Tensor) -> None:
        """Backward needs nothing."""


def decoded(source: torch.Tensor, q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of a QuantizedTensor. Their gradient is passed to `source` unchanged; the values of source are not
    read."""
    return (_DecodedInTransform if _in_transform() else _Decoded).apply(source, q, dtype)


def carried(q: Any) -> torch.Tensor:
    """The carrier of a QuantizedTensor. The gradient of the carrier is the gradient of the tensor."""
    return (_CarriedInTransform if _in_transform() else _Carried).apply(q)


def _in_transform() -> bool:
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to a value, or to each value in a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)([each(function, item) for item in value])
    return function(value)


@dataclass(frozen=True, eq=False)
class Window:
    """Where a view lies in the quantized tensor that it is a view of.

    base: the QuantizedTensor to which a write to the view goes. dtype, size, stride, offset: of the view in base's
    values, as if these were in memory, in elements of dtype."""

    base: torch.Tensor
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    @classmethod
    def like(cls, base: torch.Tensor, outline: torch.Tensor) -> Window:
        """The window of `outline`, a view of a contiguous tensor with base's shape and dtype."""
        return cls(base, outline.dtype, outline.shape, outline.stride(), outline.storage_offset())

    def outline(self) -> torch.Tensor:
        """A tensor without values, on which PyTorch computes further views."""
        count = self.base.numel() * self.base.dtype.itemsize // self.dtype.itemsize
        memory = torch.empty(count, dtype=self.dtype, device="meta")
        return memory.as_strided(self.size, self.stride, self.offset)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """This view of `values`, a contiguous tensor of base's shape: base's decoded values, or its master."""
        if self.dtype != self.base.dtype:
            if values.dtype != self.base.dtype:
                raise RuntimeError(
                    f"QuantizedTensor: a view in {self.dtype} of a tensor in {self.base.dtype} cannot take part "
                    f"in a write, since its master is in {values.dtype}; use a view in the tensor's own dtype"
                )
            values = values.view(-1).view(self.dtype)
        return values.as_strided(self.size, self.stride, values.storage_offset() + self.offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """torch.Tensor.__deepcopy__ copies all attributes, but the copy of a view is no view."""


class DecodedView(torch.Tensor):
    """A view of a QuantizedTensor that is read as its values: those of its master, or the decoded ones.

    PyTorch's operators read the values that the QuantizedTensor has at that time. Views of a DecodedView are
    DecodedViews. Operators that write to it compute on the master or the decoded values of the QuantizedTensor, and
    quantize all of it again. Copies (clone, deepcopy, pickles) are plain tensors.
    """

    window: Window
    #: What PyTorch's operators do with it. operators.py sets it.
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

    def _plain(self) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """The values, read-only: a write to them would not reach the quantized tensor. Raises TypeError for a
        view in another dtype: tools make one to write the bits of values to a file."""
        if self.dtype != self.base.dtype:
            raise TypeError(
                f"QuantizedTensor.view({self.dtype}).numpy: its bits would be those of decoded {self.base.dtype} "
                f"values; use dequantize().view({self.dtype}).numpy(), or one of buffers(). {ON_DISK}"
            )
        array = self._plain().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The values as Python numbers."""
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
