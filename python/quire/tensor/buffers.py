"""The buffers of a quantized tensor: their names, TensorProto, which describes them, and tensors made of them.

The names, dtypes and shapes of buffers are the library's: a function of spec and shape that kernels, tracing and
TensorProto share (docs/numerics.md 3.3, 4.3, 5.5). Here and in the files beside, M is the product of all sizes but the
last, K the last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quire.checks import check_dense, check_type, check_type_or_none, describe
from quire.loading.deferred import allow_in_graph
from quire.tensor.spec import QuantSpec, as_spec

#: What a quantized tensor may dequantize to by default.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: In the order of the operators' results.
BUFFER_NAMES = (
    "rowwise_data",
    "rowwise_scale",
    "rowwise_amax",
    "columnwise_data",
    "columnwise_scale",
    "columnwise_amax",
)


class DataTensors:
    """A mixin for classes that have these buffers as attributes."""

    def get_data_tensors(
        self, rowwise_data: bool = True, columnwise_data: bool = True
    ) -> torch.Tensor | None | tuple[torch.Tensor | None, torch.Tensor | None]:
        """The codes, rowwise and columnwise, None for a direction that is not stored. One tensor if only one is asked
        for; None if none is."""
        if rowwise_data and columnwise_data:
            return self.rowwise_data, self.columnwise_data
        if rowwise_data:
            return self.rowwise_data
        return self.columnwise_data if columnwise_data else None


class Nowhere(int):
    """The address 0 of a tensor that has buffers. accelerate finds tied weights in a dict by data_ptr(). If the key of
    all quantized weights were 0, it would put one of them in the place of the others."""

    def __new__(cls, buffer: int) -> Nowhere:
        self = super().__new__(cls, 0)
        self.buffer = buffer
        return self

    def __eq__(self, other: object) -> bool:
        return self.buffer == other.buffer if isinstance(other, Nowhere) else other == 0

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.buffer)


def named_buffers(results: Sequence[torch.Tensor], rowwise: bool, columnwise: bool) -> dict[str, torch.Tensor | None]:
    """The six results of an operator by name; None for a direction that was not asked for, and for an amax that
    the spec does not have."""
    asked = {"rowwise": rowwise, "columnwise": columnwise}
    named = {}
    for name, tensor in zip(BUFFER_NAMES, results, strict=True):
        direction, kind = name.split("_")
        absent = not asked[direction] or (kind == "amax" and tensor.shape[0] == 0)
        named[name] = None if absent else tensor
    return named


def at_least_one(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes as operators take them: a tensor without dimensions is quantized as [1]."""
    return tuple(shape) or (1,)


def as_matrix(t: torch.Tensor) -> torch.Tensor:
    """t as operators take it: with one dimension or more."""
    return t if t.dim() else t.reshape(1)


#: False: QuantizedTensor, True: QuantizedStack. The files of the classes, which import this one, put them here.
CLASSES: dict[bool, type[torch.Tensor]] = {}


@functools.lru_cache
def spec_of(text: str) -> QuantSpec:
    """The one QuantSpec of a canonical text."""
    return QuantSpec(text)


# Dynamo does not trace code that makes a tensor without storage, so these two functions are nodes of its graph.
# AOTAutograd looks into them and sees buffers only.
@allow_in_graph
def from_results(
    results: Sequence[torch.Tensor],
    text: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    directions: tuple[bool, bool],
    *,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """A QuantizedTensor made of the six results of an operator. directions (rowwise, columnwise): which results hold
    something. scale: the one that the operator was given."""
    kept = None if scale is None else scale.detach().clone()
    named = named_buffers(results, *directions)
    return CLASSES[False].unchecked(spec_of(text), shape, dtype, given_scale=kept, **named)


@allow_in_graph
def from_list(
    buffers: Sequence[torch.Tensor | None], text: str, shape: Sequence[int], dtype: torch.dtype, stacked: bool = False
) -> torch.Tensor:
    """A QuantizedTensor, or a QuantizedStack, made of six buffers in order, None where absent."""
    return CLASSES[stacked].unchecked(spec_of(text), shape, dtype, **dict(zip(BUFFER_NAMES, buffers, strict=True)))


@dataclass(frozen=True)
class TensorProto:
    """A description of a quantized tensor, without its data.

    Args:
        shape: the shape of the decoded tensor.
        dtype: float32, float16 or bfloat16, the dtype to which it is decoded by default.
        spec: a QuantSpec, or its text.
        requires_grad: whether create_tensor() makes a leaf that collects a gradient.
        device: of the buffers.
        rowwise: whether codes along the last dimension are stored.
        columnwise: whether codes along the first one are stored. At least one of the two is.
        stacked: whether it describes a QuantizedStack, of shape [E, N, K].

    Raises:
        TypeError: for a flag that is no bool, a spec that is no QuantSpec or text, and a device that is none.
        ValueError: for a shape that is no sequence of sizes, another dtype, a wrong text of a spec, an unknown device,
            and if neither direction is stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: QuantSpec
    requires_grad: bool = False
    device: torch.device | str = "cpu"
    rowwise: bool = True
    columnwise: bool = False
    stacked: bool = False

    def __post_init__(self) -> None:
        flags = {name: getattr(self, name) for name in ("requires_grad", "rowwise", "columnwise", "stacked")}
        check_type("TensorProto", bool, **flags)
        sizes = tuple(self.shape) if isinstance(self.shape, Sequence) else (None,)
        if not all([isinstance(size, int | torch.SymInt) and not isinstance(size, bool) for size in sizes]):
            raise ValueError(f"TensorProto: shape must be a sequence of sizes, got {describe(self.shape)}")
        if any([size < 0 for size in sizes]):
            raise ValueError(f"TensorProto: sizes must be at least 0, got the shape {list(sizes)}")
        if self.stacked and (len(sizes) != 3 or sizes[0] < 1):
            raise ValueError(
                f"TensorProto: the shape of a stack is [matrices, rows, columns], one matrix or more; got {list(sizes)}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"TensorProto: dtype must be float32, float16 or bfloat16, got {describe(self.dtype)}")
        object.__setattr__(self, "shape", sizes)
        if not isinstance(self.spec, QuantSpec):
            object.__setattr__(self, "spec", as_spec("TensorProto", self.spec))
        if not isinstance(self.device, torch.device):
            object.__setattr__(self, "device", _device(self.device))
        if not (self.rowwise or self.columnwise):
            raise ValueError(
                "TensorProto: rowwise and columnwise are both False; a quantized tensor stores at least one"
            )

    def buffers(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of everything stored, absent buffers left out."""
        empty = named_buffers(self._results("meta"), self.rowwise, self.columnwise)
        count = self.shape[:1] if self.stacked else ()
        return {name: ((*count, *t.shape), t.dtype) for name, t in empty.items() if t is not None}

    def create_tensor(self) -> torch.Tensor:
        """A QuantizedTensor whose buffers are zeroed; what they decode to is not defined."""
        if self.stacked:
            zeros = {name: torch.zeros(of[0], dtype=of[1], device=self.device) for name, of in self.buffers().items()}
            return CLASSES[True].unchecked(self.spec, self.shape, self.dtype, requires_grad=self.requires_grad, **zeros)
        results = self._results(self.device)
        tensor = from_results(results, self.spec.text, self.shape, self.dtype, (self.rowwise, self.columnwise))
        return tensor.requires_grad_() if self.requires_grad else tensor

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> TensorProto:
        """The same description with other directions; None leaves one as it is.

        Args:
            rowwise_usage: whether rowwise codes are stored. None: as before.
            columnwise_usage: whether columnwise codes are stored. None: as before.

        Raises:
            TypeError: for what is no bool.
            ValueError: if none is left.
        """
        return replace(
            self,
            rowwise=self.rowwise if rowwise_usage is None else rowwise_usage,
            columnwise=self.columnwise if columnwise_usage is None else columnwise_usage,
        )

    def _results(self, device: torch.device | str) -> Sequence[torch.Tensor]:
        try:
            matrix = at_least_one(self.shape[int(self.stacked) :])
            like = torch.empty((), dtype=self.dtype, device=device).expand(matrix)
        except RuntimeError as error:
            raise RuntimeError(f"TensorProto: no tensor has shape {tuple(self.shape)}: {error}; use less") from error
        return torch.ops.quire.empty_quantized(like, self.spec.text, self.rowwise, self.columnwise)


def checked(
    what: str,
    buffers: Mapping[str, torch.Tensor | None],
    spec: QuantSpec | str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    stacked: bool,
    is_part: bool = False,
    master: torch.Tensor | None = None,
    given_scale: torch.Tensor | None = None,
    strides: Sequence[int] | None = None,
) -> TensorProto:
    """The description of the tensor that these are to make, with the directions and the device of the buffers. Raises
    TypeError or ValueError unless all of them fit. what: the operation, which the error names."""
    rowwise, columnwise = (buffers.get(f"{direction}_data") for direction in ("rowwise", "columnwise"))
    check_type_or_none(what, torch.Tensor, rowwise_data=rowwise, columnwise_data=columnwise)
    if rowwise is None and columnwise is None:
        raise ValueError(
            f"{what}: there is neither rowwise_data nor columnwise_data, and a quantized tensor stores at least one; "
            "quire.quantize makes them"
        )
    directions = {"rowwise": rowwise is not None, "columnwise": columnwise is not None}
    device = columnwise.device if rowwise is None else rowwise.device
    try:
        proto = TensorProto(shape, dtype, spec, device=device, stacked=stacked, **directions)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}: {str(error).removeprefix('TensorProto: ')}") from None
    if not is_part:  # a part shares scales with other rows
        check_buffers(what, buffers, proto)
    _check_kept(what, proto, master, given_scale)
    if strides is not None:
        contiguous = torch.empty(proto.shape, dtype=dtype, device="meta").stride()
        if not isinstance(strides, list | tuple) or tuple(strides) != contiguous:
            raise ValueError(
                f"{what}: strides must be those of a contiguous tensor of shape {list(proto.shape)}, "
                f"{list(contiguous)}, got {describe(strides)}; leave them out, and make views of the tensor, as by t()"
            )
    return proto


def _check_kept(what: str, proto: TensorProto, master: torch.Tensor | None, given_scale: torch.Tensor | None) -> None:
    """What a tensor stores beside its buffers."""
    check_type_or_none(what, torch.Tensor, master=master, given_scale=given_scale)
    scales = (*proto.shape[: int(proto.stacked)], 1)
    for name, value, shape in (("master", master, proto.shape), ("given_scale", given_scale, scales)):
        if value is None:
            continue
        check_dense(what, **{name: value})
        if (tuple(value.shape), value.dtype, value.device) != (shape, torch.float32, proto.device):
            raise ValueError(
                f"{what}: {name} must be float32 {list(shape)} on {proto.device}, got {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )
    if given_scale is not None and proto.spec.family != "fp8_tensor" and "given" not in proto.spec.options:
        raise ValueError(
            f"{what}: only fp8_tensor and the option given have a given_scale, got one with {proto.spec}; leave it out"
        )


def _device(name: object) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"TensorProto: device must be one that PyTorch knows, got {describe(name)}: {error}") from None


def check_buffers(what: str, buffers: Mapping[str, torch.Tensor | None], proto: TensorProto) -> None:
    """Raises ValueError unless the buffers are exactly as the description says, contiguous, and on one device. what:
    the operation, which the error names."""
    given = {name: tensor for name, tensor in buffers.items() if tensor is not None}
    expected = proto.buffers()
    check_type(what, torch.Tensor, **given)
    check_dense(what, **given)
    for name in {**expected, **given}:
        where = f"{what}: {name} of {proto.spec.text} for shape {list(proto.shape)}"
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
        raise ValueError(f"{what}: all buffers must be on one device; got {listed}")


# --- codes of one direction that follow from those of the other: the same numbers in another order


#: Options under which the codes of one direction do not follow from the other, or lie in another order.
_OWN = ("4over6", "swizzled", "interleaved")


def other_direction(
    spec: QuantSpec, shape: Sequence[int], buffers: Mapping[str, torch.Tensor | None], wanted: str
) -> dict[str, torch.Tensor | None] | None:
    """Copies of the stored direction's buffers, in the order of the wanted one: the same bytes as if the original
    values had been quantized. None where that is not possible: scales of 1 x n blocks, random bits, a Hadamard
    transform, or 4over6, which decides for each direction separately (numerics.md 5.8).

    shape: of the tensor. buffers: by name, None where absent."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    if spec.stochastic or spec.hadamard or any(option.split("=")[0] in _OWN for option in spec.options):
        return None
    stored = "columnwise" if wanted == "rowwise" else "rowwise"
    data, scale, amax = (buffers[f"{stored}_{kind}"] for kind in ("data", "scale", "amax"))
    if data is None:
        return None
    lines = (rows, cols) if stored == "rowwise" else (cols, rows)  # of the stored matrix, unless it is untransposed
    sizes = tuple(shape) if wanted == "rowwise" else (cols, rows)
    if spec.family == "fp8_tensor":
        data, scale = data.reshape(lines).t().reshape(sizes), scale.clone()
    elif "128x128" in spec.options:
        data, scale = data.reshape(lines).t().reshape(sizes), scale.t()
    elif "32x32" in spec.options:
        data = data.clone()  # of the tensor's shape in both directions
        scale = _lines(scale[::32], 1, cols) if wanted == "columnwise" else _lines(scale[:, ::32], 0, rows)
    elif "16x16" in spec.options:
        data = _pack(_unpack(data.reshape(lines[0], data.shape[-1]), lines[1]).t())
        data = data.reshape(*shape[:-1], data.shape[-1]) if wanted == "rowwise" else data
        scale = _lines(scale[::16].t(), 0, lines[1], 16)
    else:
        return None
    amax = None if amax is None else amax.clone()
    return {f"{wanted}_data": data.contiguous(), f"{wanted}_scale": scale.contiguous(), f"{wanted}_amax": amax}


def _lines(tiles: torch.Tensor, dim: int, count: int, size: int = 32) -> torch.Tensor:
    """One scale for each tile -> one for each of `count` lines."""
    return tiles.repeat_interleave(size, dim).narrow(dim, 0, count)


def _unpack(data: torch.Tensor, length: int) -> torch.Tensor:
    """Bytes [n, ceil(length / 2)] -> one code a byte [n, length], the even element from the low nibble."""
    return torch.stack((data & 15, data >> 4), -1).flatten(1)[:, :length]


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of _unpack: a line of odd length ends with a zero nibble."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4
