"""Checkpoints with quant_method "mxfp4": experts of gpt-oss.

`X.gate_up_proj_blocks` is [E, 2 I, H / 32, 16], a row's codes in blocks of 32; `X.gate_up_proj_scales` is [E, 2 I,
H / 32]; `X.down_proj_*` likewise with [E, H, I / 32]. Inputs stay in 16 bits.

Rows of gate_up_proj alternate: gate, up, gate, up. quire has all rows of the gate first, so codes, scales and the bias
are moved together, and back on writing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.io.container import CheckpointError, Entry, Header
from quire.io.dialect import WORDS, Configs, LayoutDialect, check_consumed
from quire.io.joining import alternating, apart
from quire.io.layout import BYTE, E8M0, Group, Layout, Part, Shape, StoredWeight, bias, blocks, packed, read_group
from quire.tensor import QuantizedStack

_METHOD = "mxfp4"
_PARTS = (
    Part("data", "_blocks", (BYTE,), packed, "rowwise_data"),
    Part("scale", "_scales", (BYTE, E8M0), blocks(32), "rowwise_scale"),
    Part("bias", "_bias", (), bias, "bias", optional=True),
)
_PLAIN = Layout("mxfp4", "mxfp4", _PARTS, parameter="", stacked=True, multiples=(1, 32))
_GATED = dataclasses.replace(_PLAIN, name="mxfp4:gate_up", alternating=True, multiples=(2, 32))
_STEM = re.compile(r".*\.(gate_up_proj|down_proj)$")
_NAME = re.compile(r"^(?P<stem>.*\.(?P<kind>gate_up_proj|down_proj))_(blocks|scales)$")


class GptOss(LayoutDialect):
    """The dialect "gpt_oss"."""

    name = "gpt_oss"
    layouts = (_PLAIN, _GATED)
    words = WORDS | {"gate_up": "rows of gate and up in turn"}

    def detect(self, header: Header, configs: Configs) -> bool:
        said = configs.get("config.json", {}).get("quantization_config") or {}
        if said.get("quant_method") is not None:
            return str(said["quant_method"]).lower() == _METHOD
        return any(_NAME.match(name) for name in header)

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        stems = {match["stem"]: match["kind"] for match in map(_NAME.match, header) if match}
        found = [_group(stem, _GATED if kind == "gate_up_proj" else _PLAIN, header) for stem, kind in stems.items()]
        check_consumed(found, header)
        return found

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        def as_matrices(name: str) -> torch.Tensor:
            value = tensor(name)
            if name == group.names["data"]:
                value = value.flatten(2)
            return apart(value) if group.layout is _GATED else value

        stored = read_group(group, as_matrices, self.name, dtype)
        blocked = (*group.shape[:2], group.shape[2] // 32, 16)
        origin = dataclasses.replace(stored.origin, shapes={**stored.origin.shapes, "data": blocked})
        return dataclasses.replace(stored, origin=origin)

    def bias(self, group: Group, value: torch.Tensor) -> torch.Tensor:
        return apart(value) if group.layout is _GATED else value

    def choose(self, name: str, stored: StoredWeight, source: Layout | None, notes: list[str]) -> Layout:
        found = super().choose(name, stored, source, notes)
        return _GATED if name.endswith("gate_up_proj") else found

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        shape = tuple(stored.shape)
        if not isinstance(stored.weight, QuantizedStack):
            raise CheckpointError(
                f"{self.name} stores all experts of a layer as [E, N, K], got {list(shape)}",
                "stack the experts of a layer, or choose another dialect",
                tensor=name,
            )
        if _STEM.match(name) is None:
            raise CheckpointError(
                f"readers of {self.name} find experts by names that end with .gate_up_proj or .down_proj; got {name!r}",
                "name the layers of the model so, as those of quire.MoE are in this dialect, or choose another dialect",
                tensor=name,
            )
        origin = stored.origin
        shapes = {role: size for role, size in origin.shapes.items() if role != "data"}
        dtypes = {role: kind for role, kind in origin.dtypes.items() if role in shapes}
        origin = dataclasses.replace(origin, shapes=shapes, dtypes=dtypes)
        found = super().write(name, dataclasses.replace(stored, origin=origin), layout)
        data = next(key for key in found if key.endswith("_blocks"))
        if layout is _GATED:
            found = {key: alternating(value) for key, value in found.items()}
        found[data] = found[data].reshape(*shape[:2], shape[2] // 32, 16)
        return found

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        said = {"quant_method": _METHOD, "modules_to_not_convert": sorted(plain)}
        return {"config.json": {**base.get("config.json", {}), "quantization_config": said}}


def _group(stem: str, layout: Layout, header: Header) -> Group:
    """As layout.group_of(), for codes in four dimensions."""
    names = {part.role: stem + part.suffix for part in layout.parts if stem + part.suffix in header}
    for part in layout.parts:
        if part.role not in names and not part.optional:
            there = header[next(iter(names.values()))]
            raise CheckpointError(
                "the tensor is missing; a layer has _blocks, _scales, and perhaps _bias",
                "quire takes no scale to be 1; download all files of the checkpoint",
                file=there.file,
                tensor=stem + part.suffix,
            )
    data = header[names["data"]]
    if data.dtype != BYTE or len(data.shape) != 4 or data.shape[-1] != 16:
        raise _wrong(data, "uint8 [E, N, K / 32, 16]")
    shape: Shape = (*data.shape[:2], data.shape[2] * 32)
    if layout is _GATED and shape[1] % 2:
        raise _wrong(data, "an even number of rows, since those of gate and up alternate")
    scale = header[names["scale"]]
    if scale.dtype not in (BYTE, E8M0) or scale.shape != data.shape[:3]:
        raise _wrong(scale, f"uint8 {list(data.shape[:3])}")
    if "bias" in names:
        of_bias = header[names["bias"]]
        if not of_bias.dtype.is_floating_point or of_bias.shape != shape[:2]:
            raise _wrong(of_bias, f"floating point {list(shape[:2])}")
    return Group(stem, layout, shape, names)


def _wrong(entry: Entry, expected: str) -> CheckpointError:
    return CheckpointError(
        f"expected {expected}, got {entry}",
        "the tensors contradict each other; download the checkpoint again",
        file=entry.file,
        tensor=entry.name,
    )
