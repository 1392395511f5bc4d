"""Checkpoints of ComfyUI: FP8 with a scale for the tensor, NVFP4 and MXFP8. All scales multiply.

A layer is `X.weight`, `X.weight_scale`, for NVFP4 `X.weight_scale_2`, and perhaps `X.input_scale`. A JSON text says how
it is stored: the bytes of `X.comfy_quant`, or `_quantization_metadata` in the header of the file. Scales of blocks are
in the order of tensor cores, and the even element of two FP4 codes is in the high bits of a byte. Older files of FP8
have `X.scale_weight`, `X.scale_input` and one tensor `scaled_fp8` for all layers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from quire.io.container import METADATA, TEXTS, CheckpointError, Header
from quire.io.dialect import OF_FILES, WORDS, Configs, LayoutDialect, check_consumed
from quire.io.dialects.modelopt import NVFP4, STATIC_NVFP4
from quire.io.layout import (
    BYTE,
    E4M3,
    E8M0,
    F32,
    MARKER,
    SCALES,
    Group,
    Layout,
    Part,
    ShapeRule,
    StoredWeight,
    bias,
    blocks,
    codes,
    group_of,
    in_rows,
    in_tiles,
    packed,
    padded,
    scalar,
)

_METADATA = "_quantization_metadata"
_MARKER, _OLD = ".comfy_quant", ".scale_weight"
_FULL = "full_precision_matrix_mult"
#: Keys of a text beside the format. Other keys, such as the keys of rotations, change what a layer computes.
_KNOWN = {"format", _FULL, "group_size", "orig_dtype", "orig_shape"}
E5M2 = torch.float8_e5m2


def tiled(size: int) -> ShapeRule:
    """Scales of 1 x size elements in tiles of 128 x 4."""
    return lambda shape: [padded(shape[0], -(-shape[1] // size))]


def _layouts() -> Iterator[Layout]:
    old = {"scale": _OLD, "input_scale": ".scale_input", "unused_input_scale": ".scale_input"}
    for name, data, shape, scales, spec in (
        ("float8_e4m3fn", E4M3, codes, (_scale(SCALES, scalar),), "fp8_tensor"),
        ("float8_e5m2", E5M2, codes, (_scale(SCALES, scalar),), "fp8_tensor:e5m2"),
        ("nvfp4", BYTE, packed, (_scale((E4M3, BYTE), tiled(16)), _SECOND), NVFP4),
        ("mxfp8", E4M3, codes, (_scale((BYTE, E8M0), tiled(32)),), "mxfp8"),
    ):
        parts = (Part("data", ".weight", (data,), shape, "rowwise_data"), *scales)
        static = {NVFP4: STATIC_NVFP4, "mxfp8": "none"}.get(spec, f"{spec}:given")
        dynamic = "nvfp4" if spec == NVFP4 else spec
        measured = (_INPUT,) if static != "none" else ()
        size = {NVFP4: 16, "mxfp8": 32}.get(spec, 1)
        # ComfyUI pads weights of other sizes.
        full = Layout(f"{name}:full", spec, (*parts, _UNUSED, *_LAST), multiples=(size, size))
        inputs = dataclasses.replace(full, name=name, parts=(*parts, *measured, *_LAST), static=static, dynamic=dynamic)
        yield from (inputs, full)
        if spec.startswith("fp8_tensor"):
            for of in (inputs, full):
                renamed = tuple(dataclasses.replace(p, suffix=old.get(p.role, p.suffix)) for p in of.parts)
                without = tuple(part for part in renamed if part.role != MARKER)
                yield dataclasses.replace(of, name=f"scaled_fp8:{of.name}", parts=without)


def _scale(dtypes: tuple[torch.dtype, ...], shape: ShapeRule) -> Part:
    return Part("scale", ".weight_scale", dtypes, shape, "rowwise_scale")


_SECOND = Part("global", ".weight_scale_2", (F32,), scalar, "rowwise_amax")
_INPUT = Part("input_scale", ".input_scale", SCALES, scalar, "input_scale", optional=True)
_UNUSED = Part("unused_input_scale", ".input_scale", SCALES, scalar, "verbatim", optional=True)
_LAST = (
    Part("bias", ".bias", (), bias, "bias", optional=True),
    Part(MARKER, _MARKER, (BYTE,), None, "verbatim", optional=True),
)
LAYOUTS = tuple(_layouts())


class ComfyUi(LayoutDialect):
    """The dialect "comfyui"."""

    name = "comfyui"
    marks_files = True
    layouts = LAYOUTS
    words = WORDS | {"full": "inputs are not quantized", "scaled_fp8": "scales under the names of older files"}
    offered = tuple(layout for layout in LAYOUTS if not layout.name.startswith("scaled_fp8"))

    def detect(self, header: Header, configs: Configs) -> bool:
        if (configs.get("config.json", {}).get("quantization_config") or {}).get("quant_method"):
            return False
        names = (*configs.get(METADATA, {}), *header)
        return any(name.endswith((_MARKER, _OLD)) or OF_FILES.search(name) for name in names)

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        said = _said(header, configs)
        found = _old_groups(self, header, said)
        for stem, text in said.items():
            layout = self.layout(f"{text['format']}{':full' * bool(text.get(_FULL))}")
            if layout is None:
                known = sorted({one.name.partition(":")[0] for one in self.offered})
                raise CheckpointError(
                    f"the format {text['format']} is not supported; supported are {', '.join(known)}",
                    "export the model with one of these",
                    tensor=stem,
                )
            if stem + ".pre_quant_scale" in header:
                raise CheckpointError(
                    "the layer is quantized by AWQ (pre_quant_scale), whose inputs are transformed before the product; "
                    "quire does not support it",
                    "export the model without",
                    file=header[stem + ".pre_quant_scale"].file,
                    tensor=stem + ".pre_quant_scale",
                )
            found.append(group_of(layout, stem, header))
        check_consumed(found, header)
        return found

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        size = _block(group.layout)
        if size is None:
            return super().read(group, tensor, dtype)
        rows, columns = group.shape

        def in_order(name: str) -> torch.Tensor:
            value = tensor(name)
            if name == group.names["scale"]:
                return in_rows(value.view(BYTE), rows, columns // size).view(value.dtype)
            return _swapped(value) if size == 16 and name == group.names["data"] else value

        return super().read(dataclasses.replace(group, layout=_in_rows(group.layout)), in_order, dtype)

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        size, stem = _block(layout), name.removesuffix(".weight")
        found = super().write(name, stored, layout if size is None else _in_rows(layout))
        if size is not None:
            # quire writes the names that the layer had when it was read.
            data, scale = (_name_of(stored, role, stem + end) for role, end in (("data", ".weight"), _OF_SCALE))
            found[scale] = in_tiles(found[scale])
            found[data] = _swapped(found[data]) if size == 16 else found[data]
        old = layout.name.startswith("scaled_fp8")
        same = (stored.origin.dialect, stored.origin.layout) == (self.name, layout.name) and stored.origin.names
        if not old and not same:
            text = torch.tensor(list(json.dumps(_text(layout)).encode()), dtype=BYTE, device=stored.weight.device)
            found[stem + _MARKER] = text
        return found

    def texts(
        self, metadata: Mapping[str, str], entries: Mapping[str, tuple[StoredWeight | torch.Tensor, Layout | None]]
    ) -> dict[str, str]:
        """The texts of the header to be written, which describes the layers without a marker. entries: name -> what is
        written, perhaps on the meta device, and its layout if it is quantized."""
        described = {
            name.removesuffix(".weight"): _text(layout)
            for name, (value, layout) in entries.items()
            if layout is not None and layout.part(MARKER) and value.origin.names and MARKER not in value.origin.names
            if (value.origin.dialect, value.origin.layout) == (self.name, layout.name)
        }
        found = {key: text for key, text in metadata.items() if key != _METADATA}
        if _METADATA in metadata and len(_layers(metadata)) == len(described):
            return dict(metadata)
        return found | ({_METADATA: json.dumps({"format_version": "1.0", "layers": described})} if described else {})

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        of_model = dict(base.get("config.json", {}))
        of_model.pop("quantization_config", None)  # ComfyUI has none, and that of another tool would name its dialect
        of_model.pop("compression_config", None)
        return {"config.json": of_model} if of_model else {}


def _old_groups(dialect: ComfyUi, header: Header, described: Container[str]) -> list[Group]:
    """The layers of an older file: all weights of FP8 that no text describes."""
    marks = [entry for name, entry in header.items() if OF_FILES.search(name)]
    if not marks and not any(name.endswith(_OLD) for name in header):
        return []
    full = ":full" if any(entry.shape == (2,) for entry in marks) else ""
    found = []
    for name, entry in header.items():
        stem = name.removesuffix(".weight")
        if entry.dtype in (E4M3, E5M2) and stem != name and stem not in described and len(entry.shape) == 2:
            kind = "float8_e5m2" if entry.dtype == E5M2 else "float8_e4m3fn"
            found.append(group_of(dialect.layout(f"scaled_fp8:{kind}{full}"), stem, header))
    return found


_OF_SCALE = ("scale", ".weight_scale")


def _name_of(stored: StoredWeight, role: str, default: str) -> str:
    origin = stored.origin
    return origin.names.get(role, default) if origin.dialect == ComfyUi.name else default


def _text(layout: Layout) -> dict[str, Any]:
    """The text that says which layout a layer has."""
    name, _, full = layout.name.partition(":")
    return {"format": name, **({_FULL: True} if full else {})}


def _block(layout: Layout) -> int | None:
    """How many elements share one scale; None if the whole tensor does."""
    _, size = layout.multiples
    return size if size > 1 else None


def _in_rows(layout: Layout) -> Layout:
    """The layout that the scales have after in_rows(), as in the buffers."""
    rule = blocks(_block(layout))
    parts = tuple(dataclasses.replace(p, shapes=rule) if p.role == "scale" else p for p in layout.parts)
    return dataclasses.replace(layout, parts=parts)


def _swapped(codes_: torch.Tensor) -> torch.Tensor:
    """Exchanges the halves of each byte."""
    return codes_ << 4 | codes_ >> 4


def _said(header: Header, configs: Configs) -> dict[str, dict[str, Any]]:
    """Name of a layer -> what a text says about it. Raises CheckpointError for a text that quire does not
    understand."""
    metadata = configs.get(METADATA, {})
    found = {_full_name(name, header): text for name, text in _layers(metadata).items()}
    found |= {name.removesuffix(_MARKER): text for name, text in configs.get(TEXTS, {}).items()}
    for name, text in found.items():
        unknown = sorted(text.keys() - _KNOWN) if isinstance(text, dict) else [repr(text)]
        if unknown or not isinstance(text.get("format"), str):
            raise CheckpointError(
                f"what the file says of the layer is {text}; quire knows {', '.join(sorted(_KNOWN))}",
                "quire does not read layers that are rotated or stored in another way; export the model without",
                tensor=name,
            )
    return found


def _layers(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """What the header of the file says about layers."""
    try:
        found = json.loads(metadata.get(_METADATA, "{}"))
        layers = found.get("layers", {})
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{_METADATA} is no JSON object: {error}", "download the file again") from error
    if not isinstance(layers, dict):
        raise CheckpointError(f"{_METADATA} has no table of layers, got {layers!r}", "download the file again")
    return layers


def _full_name(name: str, header: Header) -> str:
    """The full name of a layer. The header may leave out the prefix of its model, such as "model.diffusion_model."."""
    if name + ".weight" in header:
        return name
    longer = [one.removesuffix(".weight") for one in header if one.endswith(f".{name}.weight")]
    return longer[0] if len(longer) == 1 else name
