"""TransformerEngine's classes of quantized tensors, as names for QuantizedTensors of certain specs, with the arguments
of its constructors.

Scales may be padded, as in TransformerEngine; the tensor stores them without padding. Without a quantizer the spec is
that of the family, the dtype of the elements and the options that are arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quire.checks import check_type, check_type_or_none
from quire.functional import amax as amaxes
from quire.te.quantizers import DType, MXFP8Quantizer, NVFP4Quantizer, Quantizer, element, quantizer_of, spec_text
from quire.tensor import QuantizedActivation, QuantizedStack, QuantizedTensor, QuantSpec, TensorProto

Shape = Sequence[int] | None
Tensor = torch.Tensor | None


def float8_tensor(
    shape: Shape = None,
    dtype: torch.dtype | None = None,
    *,
    data: Tensor,
    fp8_scale_inv: torch.Tensor,
    fp8_dtype: DType,
    data_transpose: Tensor = None,
    **options: object,
) -> QuantizedTensor:
    what = "Float8Tensor"
    check_type(what, torch.Tensor, fp8_scale_inv=fp8_scale_inv)
    one = fp8_scale_inv if data is None and data_transpose is None else (data_transpose if data is None else data)
    scale = fp8_scale_inv.to(device=one.device, dtype=torch.float32)
    given = {"rowwise": (data, scale, scale.new_zeros(1)), "columnwise": (data_transpose, scale, scale.new_zeros(1))}
    made = _made(what, spec_text("fp8_tensor", element(what, fp8_dtype)), given, (shape, dtype), options)
    values = made.detach().dequantize(torch.float32).reshape(1, -1)  # which say the amax, up to rounding
    amax, _ = amaxes(values, "fp8_tensor", columnwise=False)
    for buffer in (made.rowwise_amax, made.columnwise_amax):
        if buffer is not None:
            buffer.copy_(amax)
    return made


def blockwise_tensor(
    shape: Shape = None,
    dtype: torch.dtype | None = None,
    *,
    fp8_dtype: DType,
    is_2D_scaled: bool,
    data_format: object = None,
    **options: object,
) -> QuantizedTensor:
    what = "Float8BlockwiseQTensor"
    spec = spec_text("fp8_block", element(what, fp8_dtype), "128x128" if is_2D_scaled else "")
    return _made(what, spec, _given(options), (shape, dtype), options)


def mxfp8_tensor(
    shape: Shape = None, dtype: torch.dtype | None = None, *, fp8_dtype: DType, **options: object
) -> QuantizedTensor:
    spec = MXFP8Quantizer(fp8_dtype).spec.text
    return _made("MXFP8Tensor", spec, _given(options), (shape, dtype), options)


def nvfp4_tensor(shape: Shape = None, dtype: torch.dtype | None = None, **options: object) -> QuantizedTensor:
    known = inspect.signature(NVFP4Quantizer).parameters
    spec = NVFP4Quantizer(**{name: options.pop(name) for name in [*options] if name in known}).spec.text
    amaxes = [options.pop(f"amax_{direction}", None) for direction in ("rowwise", "columnwise")]
    return _made("NVFP4Tensor", spec, _given(options, *amaxes), (shape, dtype), options)


def _given(options: dict[str, object], *amaxes: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Takes the buffers out of the options: direction -> its data, scale and amax."""
    found = {}
    for place, direction in enumerate(("rowwise", "columnwise")):
        parts = [options.pop(f"{direction}_{kind}", None) for kind in ("data", "scale_inv")]
        found[direction] = (*parts, amaxes[place] if amaxes else None)
    return found


def _made(
    what: str,
    spec: str,
    given: Mapping[str, tuple[Tensor, ...]],
    described: tuple[Shape, torch.dtype | None],
    options: dict[str, object],
) -> QuantizedTensor:
    quantizer, swizzled = options.pop("quantizer", None), options.pop("with_gemm_swizzled_scales", False)
    fake_dtype, requires_grad = options.pop("fake_dtype", None), options.pop("requires_grad", False)
    options.pop("device", None)  # that of the data
    if options:
        raise TypeError(f"{what}: there is no argument {', '.join(map(repr, options))}")
    if swizzled:
        raise NotImplementedError(
            f"{what}: with_gemm_swizzled_scales=True is not available; pass compact scales, or use "
            "quire.QuantizedTensor.from_buffers() with the option swizzled"
        )
    check_type_or_none(what, Quantizer, quantizer=quantizer)
    kind = QuantSpec(spec) if quantizer is None else quantizer.spec
    if kind.family != QuantSpec(spec).family:
        raise ValueError(f"{what}: the quantizer must be one of {spec!r}, got one of {kind.text!r}")
    stored = {name: parts for name, parts in given.items() if parts[0] is not None}
    for name, parts in stored.items():
        check_type(what, torch.Tensor, **{f"{name}_data": parts[0]})
    if not stored:
        raise ValueError(f"{what}: a quantized tensor has rowwise or columnwise data; got none")
    shape = _shape(kind, stored) if described[0] is None else described[0]
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = described[1] or fake_dtype or torch.float32
    directions = {name: name in stored for name in given}
    expected = TensorProto(size, dtype, kind, **directions).buffers()
    buffers = {}
    for direction, parts in stored.items():
        for part, tensor in zip(("data", "scale", "amax"), parts, strict=True):
            name = f"{direction}_{part}"
            buffers[name] = _fitted(tensor, expected[name][0], part) if name in expected else None
    made = QuantizedTensor.from_buffers(buffers, kind, size, dtype)
    return made.requires_grad_(requires_grad) if requires_grad else made


def _shape(spec: QuantSpec, stored: Mapping[str, tuple[Tensor, ...]]) -> tuple[int, ...]:
    """The shape of the tensor, from the data of a direction."""
    direction, (data, *_) = next(iter(stored.items()))
    sizes = list(data.shape)
    if spec.family == "nvfp4":
        sizes[-1] *= 2
    transposed = direction == "columnwise" and spec.family != "mxfp8"
    return (*sizes[1:], sizes[0]) if transposed else tuple(sizes)


def _fitted(tensor: Tensor, size: tuple[int, ...], part: str) -> Tensor:
    """The tensor in the form of a buffer, if possible; otherwise unchanged, and the check of the buffers raises an
    error."""
    if tensor is None:
        return None
    if (
        part == "scale"
        and tensor.dim() == len(size)
        and all(have >= need for have, need in zip(tensor.shape, size, strict=True))
    ):
        return tensor[tuple(slice(need) for need in size)].contiguous()
    size_of = torch.Size(size)
    return tensor.reshape(size_of) if tensor.numel() == size_of.numel() else tensor


#: The classes that can have a spec of each family: without a gradient, and with one.
_KINDS = (QuantizedTensor, QuantizedActivation)


class _Named(type):
    """isinstance(tensor, cls) compares specs, for a QuantizedActivation too: quantized tensors of all specs have the
    same class."""

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
    """A QuantizedTensor or QuantizedActivation with one scale for the tensor (fp8_tensor)."""

    family = "fp8_tensor"
    construct = float8_tensor


class Float8BlockwiseQTensor(metaclass=_Named):
    """A QuantizedTensor or QuantizedActivation with a scale for each 1 x 128 or 128 x 128 values (fp8_block)."""

    family = "fp8_block"
    construct = blockwise_tensor


class MXFP8Tensor(metaclass=_Named):
    """A QuantizedTensor or QuantizedActivation with spec mxfp8."""

    family = "mxfp8"
    construct = mxfp8_tensor


class NVFP4Tensor(metaclass=_Named):
    """A QuantizedTensor or QuantizedActivation with spec nvfp4."""

    family = "nvfp4"
    construct = nvfp4_tensor


#: In TransformerEngine, tensors without autograd. Here they are the same classes.
Float8TensorStorage = Float8Tensor
Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor
MXFP8TensorStorage = MXFP8Tensor
NVFP4TensorStorage = NVFP4Tensor
QuantizedTensorStorage = QuantizedTensor


# --- attributes that TransformerEngine's scripts read of quantized tensors


def add_names() -> None:
    """Adds them to quire's classes, since a quantized tensor has one class, whoever made it, so no subclass can have
    them. None of them exists before, so nothing is replaced."""
    for kind in (QuantizedTensor, QuantizedActivation):
        kind.quantizer = property(quantizer_of)
    # Attributes of GroupedTensor, for layers with one quantized parameter. Parameters that are not quantized do not get
    # them.
    QuantizedStack.num_tensors = property(lambda self: self.shape[0])
    QuantizedStack.quantized_tensors = property(QuantizedStack.parts)
    QuantizedStack.split_into_quantized_tensors = QuantizedStack.parts
