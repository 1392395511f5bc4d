"""How one quantized layer lies in a file, as a table: a Layout has a Part for each tensor of the layer.

Roles: "data" (codes), "scale" (of blocks, lines or the tensor), "global" (the scale above block scales), "input_scale",
"bias", and names of what quire keeps and does not use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.io.container import CheckpointError, Entry, Header, some
from quire.tensor import QuantizedStack, QuantizedTensor, TensorProto
from quire.tensor.origin import Origin


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A quantized weight of a checkpoint, and what belongs to it.

    Args:
        weight: [N, K], or for experts in one tensor [E, N, K]. It has the codes and scales of the file, in the order of
            the buffers of quire (docs/specs.md).
        input_scale: float32 [1], or [E] for experts: the static scale of the input, as it is stored; None without one.
            The spec of the weight says whether it multiplies or divides (`global=mul`, `global=div`).
        bias: [N], in the dtype of the file, or None.
        origin: the Origin from which it was read, or at which it is to be written.
    """

    weight: QuantizedTensor | QuantizedStack
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    origin: Origin

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return self.weight.shape

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of the weight, as QuantizedTensor.dequantize().

        Args:
            dtype: float32, float16 or bfloat16. None: the dtype of the weight.
        """
        return self.weight.dequantize(dtype)


Shape = tuple[int, ...]
#: A function from the weight's logical shape ([N, K] or [E, N, K]) to the shapes that a tensor may have in the file,
#: first the shape that is written.
ShapeRule = Callable[[Shape], Sequence[Shape]]
E4M3, BYTE, E8M0 = torch.float8_e4m3fn, torch.uint8, torch.float8_e8m0fnu
#: How a spec says that a global scale is stored.
MUL, DIV = "global=mul", "global=div"
F32, SCALES = torch.float32, (torch.float32, torch.bfloat16, torch.float16)


def codes(shape: Shape) -> Sequence[Shape]:
    """One code in each byte."""
    return [shape]


def packed(shape: Shape) -> Sequence[Shape]:
    """Two codes in each byte."""
    return [(*shape[:-1], shape[-1] // 2)]


def blocks(size: int) -> ShapeRule:
    """A scale for 1 x size elements."""
    return lambda shape: [(*shape[:-1], -(-shape[-1] // size))]


def scalar(shape: Shape) -> Sequence[Shape]:
    """One scale; for a stack one for each matrix, or one for all matrices."""
    count = shape[:-2]
    return [(), (1,)] if not count else [count, (*count, 1), (*count, 1, 1), (), (1,)]


def row(shape: Shape) -> Sequence[Shape]:
    """A scale for each row."""
    return [shape[:-1], (*shape[:-1], 1)]


def bias(shape: Shape) -> Sequence[Shape]:
    return [shape[:-1]]


@dataclass(frozen=True)
class Part:
    """One tensor of a layer.

    suffix: what follows the layer's stem in the tensor's name. dtypes: the allowed ones, first the one that is written;
    empty: any floating-point dtype. shapes: None: any. place: the buffer of the weight that holds it, "input_scale" or
    "bias" of StoredWeight, or "verbatim". optional: the layer may lack it.
    """

    role: str
    suffix: str
    dtypes: tuple[torch.dtype, ...]
    shapes: ShapeRule | None
    place: str
    optional: bool = False


#: Some tools write zero points for symmetric formats too. check_zero_points() raises an error unless they are zero.
ZERO_POINTS = tuple(
    Part(role, suffix, (torch.int8, BYTE, E4M3, torch.int32, torch.int64, *SCALES), None, "verbatim", optional=True)
    for role, suffix in (("zero_point", ".weight_zero_point"), ("input_zero_point", ".input_zero_point"))
)

#: The role of a tensor that says how a layer is stored.
MARKER = "marker"
#: Roles of tensors without which a layer has the same values: a dialect that has no place for them loses nothing.
WITHOUT_VALUES = (MARKER, *(part.role for part in ZERO_POINTS))


@dataclass(frozen=True)
class Layout:
    """All tensors of a quantized layer.

    name: as the dialect calls it. spec: of the weight. static, dynamic: spec of the input with and without a stored
    input scale; "none" if the input stays in high precision. input_divides: the stored scale divides the input's
    codes. parameter: what follows the stem in the name of the weight as a parameter of a module. transposed: the file
    has [E, K, N] instead of [E, N, K]. stacked: the file has all experts in one tensor. alternating: the file has rows
    of gate and up in turn, and the weight all rows of the gate first. multiples: the tools that read the dialect refuse
    or misread a weight whose rows and columns are no multiples of these, because they have no shorter last block.
    or_less: they read one that has fewer.
    """

    name: str
    spec: str
    parts: tuple[Part, ...]
    static: str = "none"
    dynamic: str = "none"
    input_divides: bool = False
    parameter: str = ".weight"
    transposed: bool = False
    stacked: bool = False
    alternating: bool = False
    multiples: tuple[int, int] = (1, 1)
    or_less: bool = False

    def part(self, role: str) -> Part | None:
        return next((part for part in self.parts if part.role == role), None)

    @property
    def calibrated(self) -> bool:
        """Whether a layer has a static scale of its input."""
        return any(part.place == "input_scale" for part in self.parts)

    @property
    def reads_scale(self) -> bool:
        """Whether it quantizes its input by that scale. Layouts without quantized inputs can have a place for one."""
        return self.calibrated and self.static != "none"

    @property
    def needs_scale(self) -> bool:
        """Whether a layer without one is incomplete."""
        return any(part.place == "input_scale" and not part.optional for part in self.parts)

    def misfit(self, shape: Shape) -> str:
        """Why the tools that read the dialect do not read a weight of that shape, in words; "" if they do."""
        sizes = [*zip(("rows", "columns"), shape[-2:], self.multiples, strict=True)]
        if all(size % of == 0 or (self.or_less and size < of) for _, size, of in sizes):
            return ""
        needed = [f"{what} in multiples of {of}{' or less' * self.or_less}" for what, _, of in sizes if of > 1]
        return f"tools that read {self.name} need {' and '.join(needed)}, got a weight of {list(shape)}"

    def logical(self, data: Shape) -> Shape:
        """The shape of the weight, from the shape of its codes in the file."""
        data = (*data[:-2], data[-1], data[-2]) if self.transposed else data
        return (*data[:-1], data[-1] * 2) if self.parts[0].shapes is packed else data

    def shapes(self, part: Part, shape: Shape) -> list[Shape]:
        """The shapes that a part may have in the file, for a weight of that shape."""
        found = [tuple(one) for one in part.shapes(shape)]
        if self.transposed and part.role in ("data", "scale"):
            return [(*one[:-2], one[-1], one[-2]) for one in found]
        return found


@dataclass(frozen=True)
class Group:
    """A quantized layer of a checkpoint, known from headers only.

    name: of the weight, as a parameter of a module. names: role -> name of the tensor; absent tensors are left out.
    shape: of the weight.
    """

    name: str
    layout: Layout
    shape: Shape
    names: Mapping[str, str]

    @property
    def stem(self) -> str:
        return self.name.removesuffix(self.layout.parameter)


def consumed(groups: Iterable[Group]) -> set[str]:
    """Names of the tensors that belong to quantized layers."""
    return {name for group in groups for name in group.names.values()}


def group_of(layout: Layout, stem: str, header: Header) -> Group:
    """The layer with that stem under a layout. Raises CheckpointError if a tensor is missing, or has a dtype or shape
    that the layout does not have; the scale of the input may be missing (see missing_inputs)."""
    names = {part.role: stem + part.suffix for part in layout.parts if stem + part.suffix in header}
    data = layout.parts[0]
    for part in layout.parts:
        if part.role not in names and not part.optional and part.place != "input_scale":
            there = names.get(data.role)
            raise CheckpointError(
                f"the tensor is missing; a layer of {layout.name} has {', '.join(p.suffix for p in layout.parts)}",
                "quire takes no scale to be 1; export the checkpoint again, or download all of its files",
                file=header[there].file if there else None,
                tensor=stem + part.suffix,
            )
    of_data = header[names[data.role]]
    rank = 3 if layout.stacked else 2
    if len(of_data.shape) != rank:
        raise no_matrix(of_data) if rank == 2 else _wrong(layout, data, of_data, f"{rank} dimensions")
    shape = layout.logical(of_data.shape)
    for role, name in names.items():
        part, entry = layout.part(role), header[name]
        allowed = [entry.shape] if part.shapes is None else layout.shapes(part, shape)
        fits = entry.dtype in part.dtypes if part.dtypes else entry.dtype.is_floating_point
        if not fits or entry.shape not in allowed:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in part.dtypes) or "floating point"
            raise _wrong(layout, part, entry, f"{expected} {' or '.join(str(list(one)) for one in allowed)}")
    return Group(stem + layout.parameter, layout, shape, names)


def no_matrix(entry: Entry) -> CheckpointError:
    """The error for a weight of codes that has a scale but not two dimensions."""
    return CheckpointError(
        f"the weight is {entry} and has a scale, such as that of a convolution in FP8; quire reads "
        "quantized weights of two dimensions only",
        "export the model with this layer in bfloat16, float16 or float32, or replace its codes in the file by codes "
        "times scale and remove the scale",
        file=entry.file,
        tensor=entry.name,
    )


def _wrong(layout: Layout, part: Part, entry: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{layout.name} has {part.suffix} as {expected}, got {entry}",
        "the configuration and the tensors contradict each other, or the file is of another dialect; export it again",
        file=entry.file,
        tensor=entry.name,
    )


def missing_inputs(groups: Sequence[Group]) -> list[str]:
    """Names of static scales of inputs that are missing in a checkpoint."""
    lacking = [(group, part) for group in groups for part in group.layout.parts if part.place == "input_scale"]
    return [group.stem + part.suffix for group, part in lacking if part.role not in group.names and not part.optional]


def check_zero_points(groups: Sequence[Group], header: Header, tensor: Callable[[str], torch.Tensor]) -> None:
    """Raises CheckpointError for a zero point that is not zero. tensor: a function that reads a tensor by its name."""
    roles = [part.role for part in ZERO_POINTS]
    for name in [group.names[role] for group in groups for role in roles if role in group.names]:
        values = tensor(name).float()
        if bool((values != 0).any()):
            wrong = values[values != 0].reshape(-1)
            raise CheckpointError(
                f"{len(wrong)} of {values.numel()} zero points are not zero, such as {wrong[0].item()}; quire has no "
                "matmul of these",
                "export the model with symmetric quantization",
                file=header[name].file,
                tensor=name,
            )


def check_inputs(groups: Sequence[Group], header: Header) -> None:
    """Raises CheckpointError if a static scale of an input is missing."""
    if missing := missing_inputs(groups):
        first = next(group for group in groups if missing[0].startswith(group.stem))
        raise CheckpointError(
            f"the static scale of the input is missing ({len(missing)} in all: {some(missing)})",
            'calibrate these layers, or pass missing_input_scale="dynamic" to measure their inputs at run time, or, '
            'for an expert, "max" to use the largest scale of the other experts of its layer',
            file=header[first.names["data"]].file,
            tensor=missing[0],
        )


# --- tensors of a file <-> buffers


def read_group(group: Group, tensor: Callable[[str], torch.Tensor], dialect: str, dtype: torch.dtype) -> StoredWeight:
    """Reads a layer. tensor: a function that reads tensors of the file by name. dtype: the nominal dtype of the
    weight."""
    layout, shape = group.layout, group.shape
    given = {role: tensor(name) for role, name in group.names.items()}
    proto = TensorProto(shape, dtype, layout.spec, stacked=len(shape) == 3)
    wanted, buffers, beside, verbatim = proto.buffers(), {}, {}, {}
    for role, value in given.items():
        place = layout.part(role).place
        if place in wanted:
            value = value.transpose(-1, -2) if layout.transposed and role in ("data", "scale") else value
            buffers[place] = to_buffer(value, *wanted[place])
        elif place == "input_scale":
            beside[place] = to_buffer(value, (shape[0] if len(shape) == 3 else 1,), F32)
        else:
            (beside if place == "bias" else verbatim)[role if place == "verbatim" else place] = value
    if "rowwise_amax" in wanted and "rowwise_amax" not in buffers:  # of fp8_tensor, which no product reads
        buffers["rowwise_amax"] = buffers["rowwise_scale"] * torch.finfo(layout.parts[0].dtypes[0]).max
    weight = (QuantizedStack if len(shape) == 3 else QuantizedTensor).from_buffers(buffers, layout.spec, shape, dtype)
    origin = Origin(
        dialect,
        layout.name,
        names=dict(group.names),
        dtypes={role: value.dtype for role, value in given.items()},
        shapes={role: tuple(value.shape) for role, value in given.items()},
        verbatim=verbatim,
    )
    return StoredWeight(weight, beside.get("input_scale"), beside.get("bias"), origin)


def to_buffer(value: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a file in the shape and dtype of a buffer: the same bytes, or a scale widened to float32. One scale
    stands for all."""
    value = value.contiguous()
    value = value.view(dtype) if dtype == BYTE else value.to(dtype)
    if value.numel() != math.prod(shape):
        return value.reshape(-1)[:1].expand(math.prod(shape)).reshape(tuple(shape)).contiguous()
    return value.reshape(tuple(shape))


def to_file(value: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
    """The inverse of to_buffer(). Raises CheckpointError if that would round, or drop scales that differ."""
    if value.dtype == BYTE:
        return value.contiguous().view(dtype).reshape(tuple(shape))
    if value.numel() != math.prod(shape):
        first = value.reshape(-1)[:1]
        if not value.is_meta and not bool((value == first).all()):
            raise CheckpointError(
                f"{value.numel()} scales differ, and the layout has {math.prod(shape)}",
                "write a layout with a scale for each",
                tensor=name,
            )
        value = first
    narrow = value.to(dtype)
    if not value.is_meta and not torch.equal(narrow.to(value.dtype).nan_to_num(0.0), value.nan_to_num(0.0)):
        raise CheckpointError(
            f"a scale is no {dtype}: {value.reshape(-1)[:4].tolist()}...", "write float32 scales", tensor=name
        )
    return narrow.reshape(tuple(shape))


def write_group(name: str, stored: StoredWeight, layout: Layout, dialect: str) -> dict[str, torch.Tensor]:
    """The tensors of a layer by their names in the file; name: of the weight as a parameter. A layer that was read
    under the same layout gets the same names, dtypes and shapes as in that file. Raises CheckpointError for codes of
    another spec, and for a shape that tools do not read."""
    weight, origin = stored.weight, stored.origin
    if weight.spec_text != TensorProto((1, 1), weight.dtype, layout.spec).spec.text:
        raise CheckpointError(
            f"{layout.name} of {dialect} stores {layout.spec}, got a weight of {weight.spec_text}",
            "choose another layout or dialect, or quantize the weight again",
            tensor=name,
        )
    if rule := layout.misfit(weight.shape):
        raise CheckpointError(
            f"{dialect}: {rule}",
            "keep the layer in high precision (filter= of quire.convert, or entry.dequantize() of quire.io.read), or "
            'choose another dialect ("quire" has every shape)',
            tensor=name,
        )
    same = (origin.dialect, origin.layout) == (dialect, layout.name)
    stem, shape, found = name.removesuffix(layout.parameter), tuple(weight.shape), {}
    for part in layout.parts:
        value = _value(stored, part, same)
        if value is None:
            known = same and part.role in origin.dtypes
            if not known and (part.optional or part.place == "input_scale"):
                continue
            raise CheckpointError(f"{layout.name} needs {part.suffix}, got none", "read it again", tensor=name)
        kind, size = value.dtype, tuple(value.shape)
        if part.place not in ("bias", "verbatim"):
            kind, size = part.dtypes[0], layout.shapes(part, shape)[0]
        if same and part.role in origin.dtypes:
            kind, size = origin.dtypes[part.role], origin.shapes[part.role]
        target = origin.names.get(part.role, stem + part.suffix) if same else stem + part.suffix
        swapped = layout.transposed and part.role in ("data", "scale")
        size = (*size[:-2], size[-1], size[-2]) if swapped else size
        value = value if part.place in ("bias", "verbatim") else to_file(value, size, kind, target)
        found[target] = value.transpose(-1, -2).contiguous() if swapped else value
    return found


def _value(stored: StoredWeight, part: Part, same: bool) -> torch.Tensor | None:
    if part.place == "verbatim":
        return stored.origin.verbatim.get(part.role) if same else None
    if part.place in ("input_scale", "bias"):
        return getattr(stored, part.place)
    return stored.weight.buffers().get(part.place)


# --- block scales in the order of tensor cores, and in rows (numerics.md 4.5)


def padded(rows: int, blocks: int) -> tuple[int, int]:
    """The sizes of the padded matrix of scales."""
    return -(-rows // 128) * 128, -(-blocks // 4) * 4


def in_rows(scales: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Swizzled scales of any shape with as many elements as the padded matrix -> [rows, blocks]."""
    lines, columns = padded(rows, blocks)
    tiles = scales.reshape(lines // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(lines, columns)[:rows, :blocks].contiguous()


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """The inverse: [rows, blocks] -> the padded matrix, swizzled, padding 0."""
    lines, columns = padded(*scales.shape)
    whole = torch.zeros(lines, columns, dtype=torch.uint8, device=scales.device)
    whole[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = whole.reshape(lines // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(lines, columns).view(scales.dtype)
