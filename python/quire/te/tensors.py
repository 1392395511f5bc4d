"""TransformerEngine's classes of quantized tensors, as names for QuantizedTensors of certain specs."""

from __future__ import annotations

from typing import Any

from quire.tensor.quantized import QuantizedTensor


class _Named(type):
    """isinstance(tensor, cls) asks for the spec: classes of quantized tensors do not differ by it."""

    family: str

    def __instancecheck__(cls, tensor: Any) -> bool:
        return isinstance(tensor, QuantizedTensor) and tensor.spec_text.split(":")[0] == cls.family

    def __subclasscheck__(cls, other: type) -> bool:
        if issubclass(other, QuantizedTensor):  # which Dynamo asks for isinstance(), and a class has no spec
            raise NotImplementedError(
                f"{cls.__name__}: whether a QuantizedTensor is one depends on its spec, not on its class, and cannot "
                "be asked of a class or within a compiled function; read tensor.spec_text there, which starts with "
                f"{cls.family!r}"
            )
        return other is cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__name__} is a name for isinstance(): tensors with spec {cls.family!r} are QuantizedTensors. "
            f"quire.quantize(x, {cls.family!r}) makes one, QuantizedTensor.from_buffers() one of given codes"
        )


class Float8Tensor(metaclass=_Named):
    """A QuantizedTensor with one scale a tensor (fp8_tensor)."""

    family = "fp8_tensor"


class Float8BlockwiseQTensor(metaclass=_Named):
    """A QuantizedTensor with a scale for each 1 x 128 or 128 x 128 values (fp8_block)."""

    family = "fp8_block"


class MXFP8Tensor(metaclass=_Named):
    """A QuantizedTensor with spec mxfp8."""

    family = "mxfp8"


class NVFP4Tensor(metaclass=_Named):
    """A QuantizedTensor with spec nvfp4."""

    family = "nvfp4"
