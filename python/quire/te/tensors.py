"""TransformerEngine's classes of quantized tensors, as names for QuantizedTensors of certain specs, and its arguments
of their methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from quire.checks import check_type
from quire.te import tensor_constructors
from quire.tensor import QuantizedActivation, QuantizedTensor

#: What can be of a family: without a gradient, and with one.
_KINDS = (QuantizedTensor, QuantizedActivation)


class _Named(type):
    """isinstance(tensor, cls) asks for the spec, also of a QuantizedActivation: classes of quantized tensors do not
    differ by it."""

    family: str
    construct: Callable[..., QuantizedTensor]

    def __instancecheck__(cls, tensor: Any) -> bool:
        return isinstance(tensor, _KINDS) and tensor.spec_text.split(":")[0] == cls.family

    def __subclasscheck__(cls, other: type) -> bool:
        if issubclass(other, _KINDS):  # which Dynamo asks for isinstance(), and a class has no spec
            raise NotImplementedError(
                f"{cls.__name__}: whether a {other.__name__} is one depends on its spec, not on its class, and cannot "
                "be asked of a class or within a compiled function; read tensor.spec_text there, which starts with "
                f"{cls.family!r}"
            )
        return other is cls

    def __call__(cls, *args: Any, **kwargs: Any) -> QuantizedTensor:
        return cls.construct(*args, **kwargs)


class Float8Tensor(metaclass=_Named):
    """A QuantizedTensor or QuantizedActivation with one scale a tensor (fp8_tensor)."""

    family = "fp8_tensor"
    construct = tensor_constructors.float8_tensor


class Float8BlockwiseQTensor(metaclass=_Named):
    """A QuantizedTensor or QuantizedActivation with a scale for each 1 x 128 or 128 x 128 values (fp8_block)."""

    family = "fp8_block"
    construct = tensor_constructors.blockwise_tensor


class MXFP8Tensor(metaclass=_Named):
    """A QuantizedTensor or QuantizedActivation with spec mxfp8."""

    family = "mxfp8"
    construct = tensor_constructors.mxfp8_tensor


class NVFP4Tensor(metaclass=_Named):
    """A QuantizedTensor or QuantizedActivation with spec nvfp4."""

    family = "nvfp4"
    construct = tensor_constructors.nvfp4_tensor


#: In TransformerEngine, tensors without autograd. Here they are the same classes.
Float8TensorStorage = Float8Tensor
Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor
MXFP8TensorStorage = MXFP8Tensor
NVFP4TensorStorage = NVFP4Tensor
QuantizedTensorStorage = QuantizedTensor


def get_data_tensors(
    self: QuantizedTensor | QuantizedActivation, rowwise_data: bool = True, columnwise_data: bool = True
) -> torch.Tensor | None | tuple[torch.Tensor | None, torch.Tensor | None]:
    """The codes, rowwise and columnwise, None for a direction that is not stored. One tensor if only one is asked for;
    None if none is."""
    if rowwise_data and columnwise_data:
        return self.rowwise_data, self.columnwise_data
    if rowwise_data:
        return self.rowwise_data
    return self.columnwise_data if columnwise_data else None


def with_noop_flag(quantize_: Callable[..., QuantizedTensor]) -> Callable[..., QuantizedTensor]:
    """noop_flag: a tensor of one element. If it is not 0, the tensor keeps what it stores. No host reads it."""

    @functools.wraps(quantize_)
    def flagged(
        self: QuantizedTensor, values: torch.Tensor, *, noop_flag: torch.Tensor | None = None, **options: Any
    ) -> QuantizedTensor:
        if noop_flag is None:
            return quantize_(self, values, **options)
        check_type("QuantizedTensor.quantize_", torch.Tensor, noop_flag=noop_flag)
        if noop_flag.numel() != 1:
            raise ValueError(
                f"QuantizedTensor.quantize_: noop_flag must have one element, got the shape {list(noop_flag.shape)}"
            )
        before = [(buffer, buffer.clone()) for buffer in _stored(self)]
        quantize_(self, values, **options)
        with torch.no_grad():
            keeps = noop_flag.to(self.device).reshape(()) != 0
            for buffer, old in before:
                buffer.copy_(torch.where(keeps, old, buffer))
        return self

    return flagged


def _stored(tensor: QuantizedTensor) -> list[torch.Tensor]:
    """What quantize_ writes to, of tensors that are there before."""
    own = (*tensor.buffer_list(), tensor.master, tensor.given_scale)
    return [each.detach() for each in own if each is not None]


def with_usages(update_usage: Callable[..., None]) -> Callable[..., None]:
    """rowwise_usage, columnwise_usage: other words for rowwise and columnwise."""

    @functools.wraps(update_usage)
    def renamed(
        self: QuantizedTensor,
        rowwise: bool | None = None,
        columnwise: bool | None = None,
        *,
        rowwise_usage: bool | None = None,
        columnwise_usage: bool | None = None,
        **options: Any,
    ) -> None:
        pairs = {"rowwise": (rowwise, rowwise_usage), "columnwise": (columnwise, columnwise_usage)}
        for name, both in pairs.items():
            if None not in both:
                raise TypeError(
                    f"QuantizedTensor.update_usage: {name} and {name}_usage mean the same, got {both[0]!r} and "
                    f"{both[1]!r}; pass one of them"
                )
        given = {name: old if new is None else new for name, (old, new) in pairs.items()}
        update_usage(self, **given, **options)

    return renamed
