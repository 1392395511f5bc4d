"""TransformerEngine's GroupedTensor: tensors in common memory, and its words for the quantized single parameter of a
GroupedLinear."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from quire.checks import check_type, describe
from quire.te.arguments import positional
from quire.te.quantizers import Quantizer
from quire.tensor import DTYPES, QuantizedStack, QuantizedTensor, TensorProto

Shapes = Sequence[Sequence[int]]
#: Attribute -> the buffer of each tensor that it joins.
_BUFFERS = {
    "rowwise_data": "rowwise_data",
    "columnwise_data": "columnwise_data",
    "scale_inv": "rowwise_scale",
    "columnwise_scale_inv": "columnwise_scale",
    "amax": "rowwise_amax",
    "columnwise_amax": "columnwise_amax",
}


class _Grouped(type):
    """isinstance(parameter, GroupedTensor) is true of quantized single parameters too."""

    def __instancecheck__(cls, tensor: Any) -> bool:
        return isinstance(tensor, QuantizedStack) or type.__instancecheck__(cls, tensor)


class GroupedTensor(metaclass=_Grouped):
    """Tensors of one dtype and format in common memory. make_grouped_tensor_with_shapes(), make_grouped_tensor() and
    make_grouped_tensor_from_rowwise_data() make one. It is no torch.Tensor. isinstance() is also true of a
    QuantizedStack, the quantized single parameter of a GroupedLinear, which is a tensor with some of these attributes.

    num_tensors, tensor_shapes: how many tensors, and the shape of each. dtype, device: of their values. quantizer: the
    Quantizer of all, or None for values in high precision.
    rowwise_data, columnwise_data, scale_inv, columnwise_scale_inv, amax, columnwise_amax: the memory, one dimension
    each, None if absent; `value = code * scale_inv`.
    quantized_tensors, split_into_quantized_tensors(): the tensors, which share this memory.
    """

    def __init__(
        self,
        tensor_shapes: Shapes,
        dtype: torch.dtype,
        quantizer: Quantizer | None,
        buffers: dict[str, torch.Tensor],
    ) -> None:
        self.tensor_shapes = [tuple(shape) for shape in tensor_shapes]
        self.dtype, self.quantizer = dtype, quantizer
        for name, buffer in _BUFFERS.items():
            setattr(self, name, buffers.get(buffer))

    @staticmethod
    def make_grouped_tensor_with_shapes(
        num_tensors: int,
        shapes: Shapes,
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensor:
        """Tensors [M, N] of these shapes; their values are not defined. device: None is PyTorch's default one. dtype:
        None is PyTorch's default one.

        Raises TypeError or ValueError for arguments that do not fit.
        """
        what = "GroupedTensor.make_grouped_tensor_with_shapes"
        dtype = torch.get_default_dtype() if dtype is None else dtype
        device = torch.get_default_device() if device is None else device
        check_type(what, int, num_tensors=num_tensors)
        if num_tensors < 1 or len(shapes) != num_tensors or not all([len(shape) == 2 for shape in shapes]):
            raise ValueError(
                f"{what}: shapes must be [rows, columns] of each of the {num_tensors} tensors, one or more; got "
                f"{[tuple(shape) for shape in shapes]}"
            )
        if quantizer is None:
            sizes = sum(math.prod(shape) for shape in shapes)
            return GroupedTensor(shapes, dtype, None, {"rowwise_data": torch.empty(sizes, dtype=dtype, device=device)})
        if not isinstance(quantizer, Quantizer):
            raise TypeError(f"{what}: quantizer must be a Quantizer or None, got {describe(quantizer)}")
        buffers: dict[str, torch.Tensor] = {}
        layouts = [_layout(shape, dtype, quantizer) for shape in shapes]
        for name, (_, of_buffer) in layouts[0].items():
            count = sum(math.prod(layout[name][0]) for layout in layouts)
            buffers[name] = torch.zeros(count, dtype=of_buffer, device=device)
        return GroupedTensor(shapes, dtype, quantizer.copy(), buffers)

    @staticmethod
    @positional("quantizer", "device", "dtype")
    def make_grouped_tensor(
        num_tensors: int,
        first_dims: torch.Tensor | None,
        last_dims: torch.Tensor | None,
        logical_first_dim: int,
        logical_last_dim: int,
        *,
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensor:
        """make_grouped_tensor_with_shapes() of tensors with these numbers of rows and columns; None: all have the same.
        logical_first_dim, logical_last_dim: the sizes of logical_shape."""
        rows = [logical_first_dim // (num_tensors if last_dims is None else 1)] * num_tensors
        rows = rows if first_dims is None else first_dims.tolist()
        columns = [logical_last_dim] * num_tensors if last_dims is None else last_dims.tolist()
        shapes = list(zip(rows, columns, strict=True))
        return GroupedTensor.make_grouped_tensor_with_shapes(num_tensors, shapes, quantizer, device, dtype)

    @staticmethod
    def make_grouped_tensor_from_rowwise_data(
        *,
        num_tensors: int,
        tensor_shape: Sequence[int],
        rowwise_data: torch.Tensor,
        dtype: torch.dtype | None = None,
        internal: bool = False,
    ) -> GroupedTensor:
        """Tensors of one shape in high precision, in the memory of rowwise_data, which has their values one after
        another. internal: of no effect. Raises ValueError unless rowwise_data is contiguous and has that size."""
        if rowwise_data.numel() != num_tensors * math.prod(tensor_shape) or not rowwise_data.is_contiguous():
            raise ValueError(
                "GroupedTensor.make_grouped_tensor_from_rowwise_data: rowwise_data must be contiguous and have the "
                f"values of {num_tensors} tensors {list(tensor_shape)}, got {describe(rowwise_data)}"
            )
        data = rowwise_data.detach().view(-1)
        shapes = [tuple(tensor_shape)] * num_tensors
        return GroupedTensor(shapes, dtype or rowwise_data.dtype, None, {"rowwise_data": data})

    # ------------------------------------------------------------ shapes

    @property
    def num_tensors(self) -> int:
        return len(self.tensor_shapes)

    @property
    def device(self) -> torch.device | None:
        """None after clear()."""
        return next((buffer.device for buffer in self.get_data_tensors() if buffer is not None), None)

    def all_same_first_dim(self) -> bool:
        return len({shape[0] for shape in self.tensor_shapes}) <= 1

    def all_same_last_dim(self) -> bool:
        return len({shape[-1] for shape in self.tensor_shapes}) <= 1

    def all_same_shape(self) -> bool:
        return len(set(self.tensor_shapes)) <= 1

    def varying_both_dims(self) -> bool:
        return not (self.all_same_first_dim() or self.all_same_last_dim())

    def get_common_first_dim(self) -> int:
        """Raises RuntimeError if there is none."""
        return self._common("first", self.all_same_first_dim(), 0)

    def get_common_last_dim(self) -> int:
        """Raises RuntimeError if there is none."""
        return self._common("last", self.all_same_last_dim(), -1)

    def _common(self, name: str, same: bool, dim: int) -> int:
        if not same or not self.tensor_shapes:
            raise RuntimeError(f"GroupedTensor: the {name} dimension is not the same in {self.tensor_shapes}")
        return self.tensor_shapes[0][dim]

    @property
    def first_dims(self) -> torch.Tensor | None:
        """The numbers of rows, int64 [num_tensors], or None if all are the same."""
        return None if self.all_same_first_dim() else self._integers([shape[0] for shape in self.tensor_shapes])

    @property
    def last_dims(self) -> torch.Tensor | None:
        """The numbers of columns, int64 [num_tensors], or None if all are the same."""
        return None if self.all_same_last_dim() else self._integers([shape[-1] for shape in self.tensor_shapes])

    @property
    def offsets(self) -> list[int]:
        """Where the values of each tensor start among all values, and their number."""
        return [0, *itertools.accumulate(math.prod(shape) for shape in self.tensor_shapes)]

    @property
    def tensor_offsets(self) -> torch.Tensor | None:
        """offsets, int64 [num_tensors + 1], or None if all shapes are the same."""
        return None if self.all_same_shape() else self._integers(self.offsets)

    def _integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    @property
    def logical_shape(self) -> tuple[int, int]:
        """The sum of rows and the columns; if the columns differ, the rows and the sum of columns; if both differ, 1
        and the number of values."""
        if self.all_same_last_dim():
            columns = self.tensor_shapes[0][-1] if self.tensor_shapes else 0
            return self.offsets[-1] // max(columns, 1), columns
        if self.all_same_first_dim():
            return self.tensor_shapes[0][0], sum(shape[-1] for shape in self.tensor_shapes)
        return 1, self.offsets[-1]

    # ------------------------------------------------------------ values

    def has_data(self) -> bool:
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        return self.columnwise_data is not None

    @property
    def scale(self) -> torch.Tensor | None:
        """The scale of the quantizer, if it has one; `scale_inv` has the scales of the tensors."""
        return getattr(self.quantizer, "scale", None)

    def get_dtype(self) -> torch.dtype:
        return self.dtype

    def get_data_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The memory, in the order of the attributes above."""
        return tuple([getattr(self, name) for name in _BUFFERS])

    @property
    def quantized_tensors(self) -> list[torch.Tensor | QuantizedTensor]:
        return self.split_into_quantized_tensors()

    def split_into_quantized_tensors(self) -> list[torch.Tensor | QuantizedTensor]:
        """The tensors: QuantizedTensors, or without a quantizer plain ones. They share the memory."""
        found, start = [], dict.fromkeys(_BUFFERS, 0)
        for shape in self.tensor_shapes:
            layout = {"rowwise_data": (shape, self.dtype)}
            if self.quantizer is not None:
                layout = _layout(shape, self.dtype, self.quantizer)
            views = {}
            for name, buffer in _BUFFERS.items():
                if buffer in layout:
                    sizes = layout[buffer][0]
                    end = start[name] + math.prod(sizes)
                    views[buffer] = getattr(self, name)[start[name] : end].view(sizes)
                    start[name] = end
            if self.quantizer is None:
                found.append(views["rowwise_data"])
            else:
                found.append(QuantizedTensor.from_buffers(views, self.quantizer.spec, shape, self.dtype))
        return found

    def quantize(
        self, tensors: Sequence[torch.Tensor], noop_flag: torch.Tensor | None = None
    ) -> list[torch.Tensor | QuantizedTensor]:
        """Quantizes one tensor for each, and returns them as split_into_quantized_tensors() does. noop_flag: as for
        Quantizer.update_quantized(). Raises ValueError, with nothing changed, for another number or other shapes, and
        if there is no quantizer."""
        found = self.split_into_quantized_tensors()
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self.quantizer is None or shapes != self.tensor_shapes:
            quantizer = "no quantizer" if self.quantizer is None else f"{self.quantizer!r}"
            raise ValueError(
                f"GroupedTensor.quantize: expected a quantizer and tensors {self.tensor_shapes}, got {quantizer} and "
                f"tensors {shapes}"
            )
        for tensor, own in zip(tensors, found, strict=True):
            self.quantizer.update_quantized(tensor, own, noop_flag=noop_flag)
        return found

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values: [num_tensors, M, N], or [sum of rows, N] if only the numbers of rows differ. dtype: None is the
        tensors'. Raises ValueError if the numbers of columns differ."""
        if not self.all_same_last_dim() or not self.tensor_shapes:
            raise ValueError(
                f"GroupedTensor.dequantize: the numbers of columns must be the same, got tensors {self.tensor_shapes}; "
                "use split_into_quantized_tensors()"
            )
        each = self.split_into_quantized_tensors()
        dtype = self.dtype if dtype is None else dtype
        values = [one.to(dtype) if self.quantizer is None else one.dequantize(dtype) for one in each]
        return torch.stack(values) if self.all_same_shape() else torch.cat(values)

    def clear(self) -> None:
        """Frees the memory; there are no tensors then."""
        self.tensor_shapes, self.quantizer = [], None
        for name in _BUFFERS:
            setattr(self, name, None)

    def __repr__(self) -> str:
        kind = "" if self.quantizer is None else f", {self.quantizer.spec.text!r}"
        return f"GroupedTensor({self.tensor_shapes}, dtype={self.dtype}{kind}, device={str(self.device)!r})"


def _layout(
    shape: Sequence[int], dtype: torch.dtype, quantizer: Quantizer
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Buffer of one tensor -> shape, dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"GroupedTensor: dtype must be float32, float16 or bfloat16, got {dtype}")
    usage = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    return TensorProto(tuple(shape), dtype, quantizer.spec, **usage).buffers()
