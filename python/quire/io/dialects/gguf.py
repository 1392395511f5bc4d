"""GGUF files, for reading by the package gguf: their tensors, and the dialect of MXFP4 and NVFP4. Tensors of other
types are plain values.

MXFP4 has for 32 elements a byte of the scale (E8M0) and 16 bytes of codes; NVFP4 for 64 elements four scales (E4M3
without a sign) and 32 bytes of codes. A byte holds element j in its low bits and j + 16 (NVFP4: j + 8) in its high
bits; quire holds neighbours. NVFP4 can have a scale of the tensor `X.scale` and of the input `X.input_scale`, which
multiply. A scale byte 0x7F means 0 in these files.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quire.io.container import CheckpointError, Entry, Header, some
from quire.io.dialect import Configs, LayoutDialect
from quire.io.dialects.modelopt import NVFP4
from quire.io.layout import BYTE, F32, Group, Layout, Part, Shape, StoredWeight, scalar
from quire.tensor import QuantizedStack, QuantizedTensor
from quire.tensor.origin import Origin

#: Where descriptions have the type of each tensor by its name.
KEY = "gguf"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_INTEGERS = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
DTYPES = _PLAIN | _INTEGERS
#: Types that a dialect reads with their codes and scales. Tensors of other quantized types are decoded.
BLOCKS = ("MXFP4", "NVFP4")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


class GgufFile:
    """The tensors of a GGUF file, or of all files of a model that llama.cpp has split. As quire.io.container.Container;
    descriptions["gguf"] has the type of each tensor.

    path: a file, one of the files of a split model, or a folder with one model.

    Plain tensors have their dtype and shape (rows first). Tensors of BLOCKS are uint8 [..., bytes of a row]. Tensors of
    other quantized types that the package decodes, such as Q8_0 and Q4_K, are their values in float32.
    Raises CheckpointError for a damaged file and for files that are not all of one model, ImportError without the
    package gguf.
    """

    index = None

    def __init__(self, path: str | Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError(
                "quire.io: reading GGUF files needs the package gguf, which is not installed; pip install gguf"
            ) from error
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self._stored: dict[str, Any] = {}
        self.header: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        files = _files(self.path)
        for number, file in enumerate(files):
            try:
                reader = GGUFReader(file)
            except Exception as error:  # the package raises ValueError, KeyError, IndexError and others for damage
                raise CheckpointError(f"is no complete GGUF file: {error}", "download it again", file=file) from error
            self._add(file, reader, (number, len(files)))
            if number == 0:
                said = _number(file, reader, "split.tensors.count", None)
        if said not in (None, len(self.header)):
            raise CheckpointError(
                f"the files have {len(self.header)} tensors, and the first one says that there are {said}",
                "download all of them of one revision",
                file=files[0],
            )
        self.configs: dict[str, Any] = {}
        types = {name: stored.tensor_type.name for name, stored in self._stored.items()}
        self.descriptions: dict[str, Any] = {KEY: types}

    def _add(self, file: Path, reader: Any, place: tuple[int, int]) -> None:
        """The tensors and texts of one file. place: its number, and how many files there are."""
        found = tuple(_number(file, reader, f"split.{key}", default) for key, default in (("no", 0), ("count", 1)))
        if found != place:
            raise CheckpointError(
                f"the file says that it is number {found[0] + 1} of {found[1]}, its name that of {place[0] + 1} of "
                f"{place[1]}",
                "give the files the names that llama.cpp gave them, X-00001-of-00003.gguf and so on",
                file=file,
            )
        for each in reader.tensors:
            if each.name in self.header:
                other = self.header[each.name].file
                where = "the file has two such tensors" if other == file else f"the tensor is in {other.name} too"
                raise CheckpointError(where, "download it again", file=file, tensor=each.name)
            self._stored[each.name] = each
            self.header[each.name] = _entry(file, each)
        for name in ("general.architecture", "general.name"):
            if (field := reader.get_field(name)) is not None:
                self.metadata.setdefault(name, str(field.contents()))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, copied to memory."""
        from gguf.quants import dequantize

        entry, stored = self.header[name], self._stored[name]
        if entry.stored:
            return torch.from_numpy(dequantize(stored.data, stored.tensor_type)).reshape(entry.shape)
        return torch.from_numpy(stored.data.copy()).view(entry.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)


def _entry(file: Path, stored: Any) -> Entry:
    kind = stored.tensor_type.name
    shape = tuple(int(size) for size in reversed(stored.shape))
    if kind in DTYPES:
        return Entry(stored.name, file, DTYPES[kind], shape)
    if kind not in BLOCKS and _decodes(stored.tensor_type):
        return Entry(stored.name, file, torch.float32, shape, stored=kind, size=math.prod(stored.data.shape))
    return Entry(stored.name, file, torch.uint8, (*shape[:-1], stored.data.shape[-1]))


def _number(file: Path, reader: Any, name: str, default: int | None) -> int | None:
    """A number that a file says; the default if it does not say it."""
    field = reader.get_field(name)
    try:
        return default if field is None else int(field.contents())
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is no number: {error}", "download it again", file=file) from error


@functools.cache
def _decodes(kind: Any) -> bool:
    """Whether the package decodes a type: it has no list of these."""
    import numpy
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(numpy.zeros((1, GGML_QUANT_SIZES[kind][1]), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _files(path: Path) -> list[Path]:
    """The files of a model, in their order."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        models = {_SPLIT.sub(r"\g<stem>-of-\g<count>", file.name) for file in found}
        if len(models) != 1:
            raise CheckpointError(
                f"the folder has {len(models)} models: {some(sorted(models))}", "pass the file of one", file=path
            )
        path = found[0]
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    files = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing or path not in files:
        raise CheckpointError(
            f"the name says {match['number']} of {match['count']}"
            + (f", and the folder lacks {some(missing)}" if missing else ""),
            "download all files of the model into one folder",
            file=path,
        )
    return files


#: Elements of a block of bytes, bytes of its scales, elements that share one scale.
_SIZES = {"MXFP4": (32, 1, 32), "NVFP4": (64, 4, 16)}


def _raw(kind: str) -> Callable[[Shape], Sequence[Shape]]:
    elements, scales, _ = _SIZES[kind]
    return lambda shape: [(*shape[:-1], shape[-1] // elements * (scales + elements // 2))]


_DATA = {kind: Part("data", ".weight", (BYTE,), _raw(kind), "rowwise_data") for kind in _SIZES}
_MXFP4 = Layout("MXFP4", "mxfp4", (_DATA["MXFP4"],))
_GLOBAL = Part("global", ".scale", (F32,), scalar, "rowwise_amax", optional=True)
_INPUT = Part("input_scale", ".input_scale", (F32,), scalar, "input_scale", optional=True)
_NVFP4 = Layout("NVFP4", NVFP4, (_DATA["NVFP4"], _GLOBAL, _INPUT), static=f"{NVFP4}:given")
_LAYOUTS = {"MXFP4": _MXFP4, "NVFP4": _NVFP4}


class Gguf(LayoutDialect):
    """The dialect "gguf"."""

    name = "gguf"
    read_only = True
    layouts = (_MXFP4, _NVFP4)

    def detect(self, header: Header, configs: Configs) -> bool:
        return KEY in configs

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        types, found = configs[KEY], []
        for name, entry in header.items():
            kind = types[name]
            if kind in DTYPES or entry.stored:
                continue
            if kind not in _LAYOUTS or not name.endswith(".weight"):
                raise CheckpointError(
                    f"the tensor is of type {kind}; quire reads weights of {', '.join(_LAYOUTS)}, and other types that "
                    "the package gguf decodes",
                    "convert the model to one of these types, or install a newer gguf",
                    file=entry.file,
                    tensor=name,
                )
            found.append(_group(name, kind, entry, header))
        return found

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        raw = {role: tensor(name) for role, name in group.names.items()}
        kind, shape = group.layout.name, group.shape
        scales, codes = blocks_of(raw["data"].reshape(-1, raw["data"].shape[-1]), kind)
        if not codes.is_meta:
            _check_scales(scales, kind, group)
        if kind == "NVFP4":
            scales = torch.where(scales == 0x7F, torch.zeros_like(scales), scales)
        buffers = {
            "rowwise_data": codes.reshape(*shape[:-1], shape[-1] // 2),
            "rowwise_scale": scales.reshape(*shape[:-1], -1),
        }
        count = math.prod(shape[:-2])
        if kind == "NVFP4":
            value = raw.get("global", torch.ones(1, dtype=torch.float32, device=codes.device))
            buffers["rowwise_amax"] = value.reshape(-1).expand(count).reshape((*shape[:-2], 1)).contiguous()
        stacked = len(shape) == 3
        weight = (QuantizedStack if stacked else QuantizedTensor).from_buffers(buffers, group.layout.spec, shape, dtype)
        static = raw.get("input_scale")
        if static is not None:
            static = static.reshape(-1).expand(count).contiguous()
        origin = Origin(
            self.name,
            kind,
            names=dict(group.names),
            dtypes={role: value.dtype for role, value in raw.items()},
            shapes={role: tuple(value.shape) for role, value in raw.items()},
        )
        return StoredWeight(weight, static, None, origin)

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        raise CheckpointError("quire reads GGUF files and does not write them", "choose another dialect", tensor=name)

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        raise CheckpointError("quire reads GGUF files and does not write them", "choose another dialect")


def _group(name: str, kind: str, entry: Entry, header: Header) -> Group:
    elements, scales, _ = _SIZES[kind]
    shape = (*entry.shape[:-1], entry.shape[-1] // (scales + elements // 2) * elements)
    if len(shape) not in (2, 3):
        raise CheckpointError(
            f"a quantized tensor has 2 or 3 dimensions, got {entry}",
            "quire does not read this file",
            file=entry.file,
            tensor=name,
        )
    layout, stem, names = _LAYOUTS[kind], name.removesuffix(".weight"), {"data": name}
    for part in layout.parts[1:]:
        other = header.get(stem + part.suffix)
        if other is None:
            continue
        if other.dtype != F32 or math.prod(other.shape) not in (1, math.prod(shape[:-2])):
            raise CheckpointError(
                f"expected float32, one value or one for each expert, got {other}",
                "convert the model again",
                file=other.file,
                tensor=other.name,
            )
        names[part.role] = other.name
    return Group(name, layout, shape, names)


def blocks_of(rows: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [N, bytes of a row] -> scale bytes [N, K / size] and codes [N, K / 2], even elements in the low bits."""
    elements, count, size = _SIZES[kind]
    blocks = rows.reshape(rows.shape[0], -1, count + elements // 2)
    scales, codes = blocks[..., :count], blocks[..., count:]
    halves = codes.reshape(rows.shape[0], -1, size // 2)  # a byte each of element j and j + size / 2
    low, high = halves & 15, halves >> 4
    in_order = torch.cat([low, high], -1)
    packed = in_order[..., 0::2] | in_order[..., 1::2] << 4
    return scales.reshape(rows.shape[0], -1).contiguous(), packed.reshape(rows.shape[0], -1)


def _check_scales(scales: torch.Tensor, kind: str, group: Group) -> None:
    """Raises CheckpointError for scale bytes that mean another number in the file than in quire."""
    wrong, meaning = ((scales == 255), "2^128") if kind == "MXFP4" else ((scales >= 0x80), "that of its lower 7 bits")
    if bool(wrong.any()):
        raise CheckpointError(
            f"{int(wrong.sum())} scales have the byte {int(scales[wrong][0]):#x}, which means {meaning} in GGUF files "
            "and another number in quire",
            "no converter writes this; download the file again",
            tensor=group.name,
        )
