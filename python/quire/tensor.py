"""Quantized tensors as values: how (QuantSpec), what is stored (TensorProto), and the stored buffers (QuantizedTensor).

The names, dtypes and shapes of buffers are the library's: a function of spec and shape that kernels, tracing and
TensorProto share (docs/numerics.md 3.3, 4.3, 5.5). In this file M is the product of all sizes but the last, K the last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

#: In the order of the operators' results.
BUFFER_NAMES = (
    "rowwise_data",
    "rowwise_scale",
    "rowwise_amax",
    "columnwise_data",
    "columnwise_scale",
    "columnwise_amax",
)


@torch.compiler.assume_constant_result  # text in, text out: while tracing it is a constant
def _canonical(text: str) -> str:
    try:
        return torch.ops.quire.canonical_spec(text)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized, as text such as "nvfp4:rht:sr"; docs/specs.md has the grammar.

    Kept in canonical form, so that equal specs are equal values: QuantSpec("mxfp8") == QuantSpec("mxfp8").
    Raises ValueError that points at the wrong part of the text and lists what is allowed there.
    """

    text: str

    def __post_init__(self) -> None:
        text = self.text.text if isinstance(self.text, QuantSpec) else self.text
        if not isinstance(text, str):
            raise TypeError(f"QuantSpec: expected a text such as 'nvfp4:rht:sr', got {text!r}")
        object.__setattr__(self, "text", _canonical(text))

    @property
    def family(self) -> str:
        """The first word: "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "mxfp4" or "nvfp4"."""
        return self.text.split(":")[0]

    @property
    def options(self) -> tuple[str, ...]:
        """The other words, in canonical order."""
        return tuple(self.text.split(":")[1:])

    @property
    def stochastic(self) -> bool:
        """Whether elements are rounded stochastically, so that quantizing needs a seed (numerics.md 5.6, 0.11)."""
        return "sr" in self.options

    @property
    def hadamard(self) -> bool:
        """Whether columnwise codes hold the tensor's Hadamard transform (numerics.md 5.3, 0.10)."""
        return any(option.split("=")[0] == "rht" for option in self.options)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"QuantSpec({self.text!r})"


@dataclass(frozen=True)
class TensorProto:
    """A quantized tensor without its data.

    shape: logical, rank >= 1. dtype: what it dequantizes to by default. rowwise, columnwise: the directions stored.
    requires_grad is part of the description only; a QuantizedTensor has no gradient in this version.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: QuantSpec
    requires_grad: bool = False
    device: torch.device | str = "cpu"
    rowwise: bool = True
    columnwise: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.spec, QuantSpec):
            object.__setattr__(self, "spec", QuantSpec(self.spec))
        if not isinstance(self.device, torch.device):
            object.__setattr__(self, "device", torch.device(self.device))
        if not (self.rowwise or self.columnwise):
            raise ValueError(
                "TensorProto: rowwise and columnwise are both False; a quantized tensor stores at least one"
            )

    def buffers(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of everything stored, absent buffers left out."""
        empty = self._empty("meta")
        return {name: (tuple(t.shape), t.dtype) for name, t in empty.items() if t is not None}

    def create_tensor(self) -> "QuantizedTensor":
        """A tensor with uninitialised buffers. Raises NotImplementedError if requires_grad."""
        if self.requires_grad:
            raise NotImplementedError(
                "TensorProto.create_tensor: a QuantizedTensor has no gradient in this version; set requires_grad=False"
            )
        return QuantizedTensor(self.spec, self.shape, self.dtype, **self._empty(self.device))

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> "TensorProto":
        """The same description with other directions; None leaves one as it is. Raises ValueError if none is left."""
        return replace(
            self,
            rowwise=self.rowwise if rowwise is None else rowwise,
            columnwise=self.columnwise if columnwise is None else columnwise,
        )

    def _empty(self, device: torch.device | str) -> dict[str, torch.Tensor | None]:
        try:
            like = torch.empty((), dtype=self.dtype, device=device).expand(self.shape)
        except RuntimeError as error:
            raise RuntimeError(f"TensorProto: no tensor has shape {tuple(self.shape)}: {error}; use less") from error
        results = torch.ops.quire.empty_quantized(like, self.spec.text, self.rowwise, self.columnwise)
        return named_buffers(results, self.rowwise, self.columnwise)


def named_buffers(results: Sequence[torch.Tensor], rowwise: bool, columnwise: bool) -> dict[str, torch.Tensor | None]:
    """Six results of an operator by name; None for a direction not asked for and for an amax that the spec has not."""
    asked = {"rowwise": rowwise, "columnwise": columnwise}
    named = {}
    for name, tensor in zip(BUFFER_NAMES, results, strict=True):
        direction, kind = name.split("_")
        absent = not asked[direction] or (kind == "amax" and tensor.shape[0] == 0)
        named[name] = None if absent else tensor
    return named


class QuantizedTensor:
    """The buffers of a quantized tensor, its spec, logical shape and dtype. A plain object, not a torch.Tensor.

    rowwise_data, rowwise_scale, rowwise_amax, columnwise_data, columnwise_scale, columnwise_amax: tensors as
    TensorProto.buffers() says, None where absent. `scale` multiplies codes back.
    """

    def __init__(
        self, spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype, **buffers: torch.Tensor | None
    ) -> None:
        """For buffers that come from an operator: nothing is checked. from_buffers() checks."""
        self.spec = spec
        self.shape = tuple(shape)
        self.dtype = dtype
        for name in BUFFER_NAMES:
            setattr(self, name, buffers[name])

    @classmethod
    def from_buffers(
        cls,
        buffers: Mapping[str, torch.Tensor | None],
        spec: QuantSpec | str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> "QuantizedTensor":
        """A tensor of buffers by name, not copied. Raises ValueError unless they are exactly those of TensorProto:
        names, dtypes, shapes, contiguous, on one device."""
        given = {name: tensor for name, tensor in buffers.items() if tensor is not None}
        proto = TensorProto(
            tuple(shape),
            dtype,
            QuantSpec(spec),
            rowwise="rowwise_data" in given,
            columnwise="columnwise_data" in given,
        )
        _check_buffers(given, proto)
        return cls(proto.spec, proto.shape, dtype, **{name: given.get(name) for name in BUFFER_NAMES})

    def buffers(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, absent ones left out."""
        named = {name: getattr(self, name) for name in BUFFER_NAMES}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def proto(self) -> TensorProto:
        """The description of this tensor."""
        return TensorProto(
            self.shape,
            self.dtype,
            self.spec,
            device=self.device,
            rowwise=self.rowwise_data is not None,
            columnwise=self.columnwise_data is not None,
        )

    @property
    def device(self) -> torch.device:
        return (self.columnwise_data if self.rowwise_data is None else self.rowwise_data).device

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for tensor in self.buffers().values())

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded tensor [shape] in `dtype` (float32, float16 or bfloat16; None: self.dtype), from rowwise codes if
        there are any, else from columnwise ones (numerics.md 3.4, 4.6, 5.1).

        Raises ValueError where only columnwise codes of a Hadamard-transformed tensor are stored.
        """
        dtype = self.dtype if dtype is None else dtype
        if self.rowwise_data is not None:
            return self._decode("rowwise", dtype)
        if self.spec.hadamard:
            raise ValueError(
                f"dequantize: only columnwise codes of {self.spec} are stored, and they hold the Hadamard transform of "
                "the tensor; quantize with rowwise=True"
            )
        return self._decode("columnwise", dtype).t().reshape(self.shape)

    def _decode(self, direction: str, dtype: torch.dtype) -> torch.Tensor:
        data, scale, amax = (getattr(self, f"{direction}_{kind}") for kind in ("data", "scale", "amax"))
        if amax is None:
            amax = torch.empty(0, device=data.device)
        columnwise = direction == "columnwise"
        return torch.ops.quire.dequantize(data, scale, amax, self.spec.text, columnwise, self.shape, dtype)

    def to(self, device: torch.device | str) -> "QuantizedTensor":
        """A tensor whose buffers are on `device`. Codes have no other dtype: dequantize(dtype) converts."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"QuantizedTensor.to takes a device, got {device}; dequantize({device}) gives plain values")
        moved = {name: tensor.to(device) for name, tensor in self.buffers().items()}
        return QuantizedTensor(self.spec, self.shape, self.dtype, **{name: moved.get(name) for name in BUFFER_NAMES})

    def __repr__(self) -> str:
        directions = [d for d in ("rowwise", "columnwise") if getattr(self, f"{d}_data") is not None]
        return (
            f"QuantizedTensor({self.spec.text!r}, shape={list(self.shape)}, dtype={self.dtype}, "
            f"{' + '.join(directions)}, {self.nbytes} bytes, device={str(self.device)!r})"
        )


def _check_buffers(given: Mapping[str, torch.Tensor], proto: TensorProto) -> None:
    expected = proto.buffers()
    for name in {**expected, **given}:
        where = f"QuantizedTensor.from_buffers: {name} of {proto.spec} for shape {list(proto.shape)}"
        if name not in expected:
            raise ValueError(f"{where} should be absent; the buffers are {', '.join(expected)}")
        if name not in given:
            raise ValueError(f"{where} is missing; the buffers are {', '.join(expected)}, got {', '.join(given)}")
        shape, dtype = expected[name]
        tensor = given[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            layout = "" if tensor.is_contiguous() else " (not contiguous)"
            raise ValueError(
                f"{where} must be contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}{layout}; "
                "TensorProto.buffers() lists the layout"
            )
    devices = {name: tensor.device for name, tensor in given.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"QuantizedTensor.from_buffers: all buffers must be on one device; got {listed}")
