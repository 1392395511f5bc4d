"""MXFP4 and NVFP4 of GGUF files, for reading. Tensors of other types are plain values (quire.io.gguf_file).

MXFP4 has for 32 elements a byte of the scale (E8M0) and 16 bytes of codes; NVFP4 for 64 elements four scales (E4M3
without a sign) and 32 bytes of codes. A byte holds element j in its low bits and j + 16 (NVFP4: j + 8) in its high
bits; quire holds neighbours. NVFP4 can have a scale of the tensor `X.scale` and of the input `X.input_scale`, which
multiply. A scale byte 0x7F means 0 in these files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.io.container import CheckpointError, Entry, Header
from quire.io.dialect import Configs, LayoutDialect
from quire.io.dialects.modelopt import NVFP4
from quire.io.gguf_file import DTYPES, KEY
from quire.io.layout import BYTE, F32, Group, Layout, Part, Shape, StoredWeight, scalar
from quire.tensor import QuantizedStack, QuantizedTensor
from quire.tensor.origin import Origin

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
