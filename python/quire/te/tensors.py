"""TransformerEngine's classes of quantized tensors, as names for QuantizedTensors of certain specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
