"""Checkpoints with quant_method "fp8", as DeepSeek introduced them: a scale for 128 x 128 elements, which multiplies.

A layer is `X.weight` and `X.weight_scale_inv`, from DeepSeek-V4 on `X.scale`. Scales are float32, bfloat16 (Qwen3) or
E8M0 bytes. Variants have a scale per tensor with a static scale of the input, or MXFP8 blocks. Experts can be MXFP4
under the same configuration: dtypes and shapes decide, since conversions leave `expert_dtype` out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quire.io.container import CheckpointError, Entry, Header, some
from quire.io.dialect import WORDS, Configs, LayoutDialect, check_consumed
from quire.io.layout import (
    BYTE,
    E4M3,
    E8M0,
    F32,
    SCALES,
    Group,
    Layout,
    Part,
    Shape,
    ShapeRule,
    StoredWeight,
    bias,
    blocks,
    codes,
    consumed,
    group_of,
    packed,
    scalar,
)

METHODS = ("fp8", "mxfp8")
BYTES = (E8M0, BYTE)
#: Dtypes for two codes in a byte; DeepSeek writes the first one.
_PACKED = (torch.int8, BYTE, torch.float4_e2m1fn_x2)


def tiles(shape: Shape) -> Sequence[Shape]:
    """A scale for 128 x 128 elements; fewer elements at the edges of the matrix."""
    return [(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))]


def _layout(name: str, spec: str, scale: Part, *others: Part, dynamic: str, static: str = "none") -> Layout:
    four_bit = spec == "mxfp4"
    data = Part("data", ".weight", _PACKED if four_bit else (E4M3,), packed if four_bit else codes, "rowwise_data")
    last = Part("bias", ".bias", (), bias, "bias", optional=True)
    return Layout(name, spec, (data, scale, *others, last), static=static, dynamic=dynamic)


def _scale(dtypes: tuple[torch.dtype, ...], shape: ShapeRule) -> Part:
    return Part("scale", ".weight_scale_inv", dtypes, shape, "rowwise_scale")


def _v4(of: Layout) -> Layout:
    """The layout with the names of DeepSeek-V4."""
    parts = tuple(dataclasses.replace(p, suffix=".scale") if p.role == "scale" else p for p in of.parts)
    return dataclasses.replace(of, name=f"{of.name}:scale", parts=parts)


def _experts(of: Layout) -> Layout:
    """The layout with all experts in one tensor [E, N, K]."""
    suffixes = {"data": "", "scale": "_scale_inv", "bias": "_bias"}
    parts = tuple(dataclasses.replace(p, suffix=suffixes[p.role]) for p in of.parts)
    return dataclasses.replace(of, name=f"{of.name}:experts", parts=parts, parameter="", stacked=True)


_ACTIVATION = Part("input_scale", ".activation_scale", (F32,), scalar, "input_scale")
_SCALAR = _scale(SCALES, scalar)
_BLOCK = _layout("fp8_block", "fp8_block:128x128", _scale(SCALES, tiles), dynamic="fp8_block")
# Powers of two, in a float dtype or as E8M0. The scales of inputs are powers of two as well.
_POW2 = dataclasses.replace(_BLOCK, name="fp8_block:ue8m0", dynamic="fp8_block:pow2")
_E8M0 = _layout("fp8_block:e8m0", "fp8_block:128x128", _scale(BYTES, tiles), dynamic="fp8_block:pow2")
_TENSOR = _layout("fp8_tensor", "fp8_tensor", _SCALAR, dynamic="fp8_tensor")
_STATIC = _layout(
    "fp8_tensor:static", "fp8_tensor", _SCALAR, _ACTIVATION, dynamic="fp8_tensor", static="fp8_tensor:given"
)
# Readers derive the size of a block from the counts of codes and scales. Tiles may be smaller at the edges: DeepSeek's
# own kernels mask them, and DeepSeek-V3 has such weights.
_MXFP8 = dataclasses.replace(_layout("mxfp8", "mxfp8", _scale(BYTES, blocks(32)), dynamic="mxfp8"), multiples=(1, 32))
_MXFP4 = dataclasses.replace(
    _layout("mxfp4", "mxfp4", _scale(BYTES, blocks(32)), dynamic="fp8_block:pow2"), multiples=(1, 32)
)
_BLOCKED = (_BLOCK, _POW2, _E8M0, _MXFP8, _MXFP4)
LAYOUTS = (
    *_BLOCKED,
    _TENSOR,
    _STATIC,
    *(_v4(of) for of in _BLOCKED),
    *(_experts(of) for of in _BLOCKED),
)


class DeepSeek(LayoutDialect):
    """The dialect "deepseek"."""

    name = "deepseek"
    layouts = LAYOUTS
    words = WORDS | {
        "ue8m0": "scales are powers of two, in a float dtype",
        "e8m0": "scales are powers of two, in E8M0",
        "scale": "scales are named .scale",
    }

    def detect(self, header: Header, configs: Configs) -> bool:
        method = _said(configs).get("quant_method")
        if method is not None:
            return str(method).lower() in METHODS
        return any(name.endswith("_scale_inv") or _is_v4(header, name) for name in header)

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        said = _said(configs)
        size = _block_size(said)
        v4 = any(_is_v4(header, name) for name in header)
        found = []
        for name, entry in header.items():
            stem = name.removesuffix(".weight")
            stacked = len(entry.shape) == 3 and not name.endswith(".weight")
            suffix = ":experts" if stacked else ":scale" if v4 and stem + ".weight_scale_inv" not in header else ""
            if entry.dtype not in (E4M3, *_PACKED) or (stem == name and not stacked):
                continue
            where = {":experts": name + "_scale_inv", ":scale": stem + ".scale", "": stem + ".weight_scale_inv"}
            kind = _kind(entry, header.get(where[suffix]), said, size)
            if kind == "fp8_tensor":
                suffix = ""
                static = stem + ".activation_scale" in header or said.get("activation_scheme") == "static"
                kind += ":static" if static else ""
            group = group_of(self.layout(kind + suffix), name if stacked else stem, header)
            _check_size(group, header, said, size)
            found.append(group)
        used = consumed(found)
        left = [name for name in header if _is_v4(header, name) and name not in used]
        if left:
            raise CheckpointError(
                f"the scale belongs to no quantized weight ({len(left)} such tensors: {some(left)})",
                "its weight is missing; download all files of the checkpoint",
                file=header[left[0]].file,
                tensor=left[0],
            )
        check_consumed(found, header)
        return found

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        scale = tensor(group.names["scale"])
        if scale.dtype != BYTE:
            return super().read(group, lambda name: scale if name == group.names["scale"] else tensor(name), dtype)
        number = scale.view(E8M0)  # the byte is an exponent, also where the buffer is float32
        stored = super().read(group, lambda name: number if name == group.names["scale"] else tensor(name), dtype)
        origin = dataclasses.replace(stored.origin, dtypes={**stored.origin.dtypes, "scale": BYTE})
        return dataclasses.replace(stored, origin=origin)

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        origin = stored.origin
        bytes_ = (origin.dialect, origin.layout) == (self.name, layout.name) and origin.dtypes.get("scale") == BYTE
        if bytes_:
            origin = dataclasses.replace(origin, dtypes={**origin.dtypes, "scale": E8M0})
        found = super().write(name, dataclasses.replace(stored, origin=origin), layout)
        if bytes_:
            found[origin.names["scale"]] = found[origin.names["scale"]].view(BYTE)
        return found

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        kinds = {group.layout.name.removesuffix(":scale").removesuffix(":experts") for group in groups}
        said: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
        static = "fp8_tensor:static" in kinds
        said["activation_scheme"] = "static" if static else "dynamic"
        dense = kinds - {"mxfp4"} or {"mxfp4"}
        sizes = {"fp8_tensor": None, "fp8_tensor:static": None, "mxfp8": [1, 32], "mxfp4": [1, 32]}
        wanted = [sizes.get(kind, [128, 128]) for kind in sorted(dense)]
        if any(size != wanted[0] for size in wanted):
            raise CheckpointError(
                f"one configuration of deepseek has one size of blocks; the layers have {', '.join(sorted(dense))}",
                "write layers of one kind, or another dialect",
            )
        said["weight_block_size"] = wanted[0]
        if dense <= {"fp8_block:ue8m0", "fp8_block:e8m0", "mxfp8", "mxfp4"}:
            said["scale_fmt"] = "ue8m0"
        if "mxfp4" in kinds:
            said["expert_dtype"] = "fp4"
        said["modules_to_not_convert"] = sorted(plain)
        return {"config.json": {**base.get("config.json", {}), "quantization_config": said}}


def _said(configs: Configs) -> Mapping[str, Any]:
    return configs.get("config.json", {}).get("quantization_config") or {}


def _is_v4(header: Header, name: str) -> bool:
    """Whether it is a scale under the names of DeepSeek-V4."""
    return name.endswith(".scale") and header[name].dtype in BYTES


def _block_size(said: Mapping[str, Any]) -> tuple[int, ...] | None:
    size = said.get("weight_block_size")
    if size is None:
        return None
    if list(size) not in ([128, 128], [1, 32]):
        raise CheckpointError(
            f"weight_block_size must be [128, 128] or [1, 32], got {size}", "quire has no matmul of other blocks"
        )
    return tuple(size)


def _kind(data: Entry, scale: Entry | None, said: Mapping[str, Any], size: tuple[int, ...] | None) -> str:
    """The layout of a layer: by its tensors, or by the configuration if a tensor is missing."""
    if data.dtype != E4M3:
        return "mxfp4"
    pow2 = said.get("scale_fmt") == "ue8m0"
    if scale is None:
        of_tensor = "weight_block_size" in said and size is None
        return "fp8_tensor" if of_tensor else "mxfp8" if size == (1, 32) else "fp8_block"
    if len(scale.shape) < 2 and len(data.shape) == 2:
        return "fp8_tensor"
    if scale.dtype not in BYTES:
        return "fp8_block:ue8m0" if pow2 else "fp8_block"
    in_blocks = scale.shape == tuple(blocks(32)(data.shape)[0])
    in_tiles = scale.shape == tuple(tiles(data.shape)[0])
    return "mxfp8" if in_blocks and (not in_tiles or size == (1, 32)) else "fp8_block:e8m0"


def _check_size(group: Group, header: Header, said: Mapping[str, Any], size: tuple[int, ...] | None) -> None:
    """Raises CheckpointError if FP8 tensors are not as the configuration says."""
    spec = group.layout.spec
    if "weight_block_size" not in said or spec == "mxfp4":
        return
    found = {"fp8_tensor": None, "mxfp8": (1, 32)}.get(spec, (128, 128))
    if found != size:
        entry = header[group.names["scale"]]
        raise CheckpointError(
            f"config.json says weight_block_size {said['weight_block_size']}, the scale is {entry} as of {spec}",
            "the configuration is of another checkpoint; download both of one revision",
            file=entry.file,
            tensor=entry.name,
        )
