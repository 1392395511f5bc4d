"""Checkpoints of AutoFP8 and vLLM (quant_method "fp8"): FP8 with scales that multiply.

A layer is `X.weight`, `X.weight_scale`, and with activation_scheme "static" `X.input_scale`. AutoFP8 and vLLM have one
scale for a weight. quire also reads one for each row, and does not choose that for layers of other dialects. Files can
have zero points, which are all zero. DeepSeek's checkpoints have the same quant_method and other names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.io.container import CheckpointError, Header
from quire.io.dialect import Configs, LayoutDialect, check_consumed
from quire.io.layout import (
    E4M3,
    SCALES,
    ZERO_POINTS,
    Group,
    Layout,
    Part,
    ShapeRule,
    bias,
    codes,
    group_of,
    row,
    scalar,
)

METHOD = "fp8"
_SCALE = ".weight_scale"
#: What only the configurations of DeepSeek's checkpoints say.
_OF_BLOCKS = {"weight_block_size", "scale_fmt"}


def _layout(name: str, spec: str, shape: ShapeRule, *inputs: Part, dynamic: str) -> Layout:
    parts = (
        Part("data", ".weight", (E4M3,), codes, "rowwise_data"),
        Part("scale", _SCALE, SCALES, shape, "rowwise_scale"),
        *inputs,
        Part("bias", ".bias", (), bias, "bias", optional=True),
        *ZERO_POINTS,
    )
    return Layout(name, spec, parts, static="fp8_tensor:given" if inputs else "none", dynamic=dynamic)


_INPUT = Part("input_scale", ".input_scale", SCALES, scalar, "input_scale")
LAYOUTS = (
    _layout("tensor:dynamic", "fp8_tensor", scalar, dynamic="fp8_tensor"),
    _layout("tensor:static", "fp8_tensor", scalar, _INPUT, dynamic="fp8_tensor"),
    _layout("row:dynamic", "fp8_row", row, dynamic="fp8_row"),
    _layout("row:static", "fp8_row", row, _INPUT, dynamic="fp8_tensor"),
)


class AutoFp8(LayoutDialect):
    """The dialect "autofp8"."""

    name = "autofp8"
    layouts = LAYOUTS
    offered = LAYOUTS[:2]

    def detect(self, header: Header, configs: Configs) -> bool:
        said = _said(configs)
        if str(said.get("quant_method", "")).lower() != METHOD:
            return False
        named = [any(name.endswith(end) for name in header) for end in (_SCALE, "_scale_inv")]
        return named[0] and not named[1] or not (named[1] or said.keys() & _OF_BLOCKS)

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        of_configuration, found = _said(configs).get("activation_scheme"), []
        for name, entry in header.items():
            stem = name.removesuffix(".weight")
            if entry.dtype != E4M3 or stem == name:
                continue
            scale = header.get(stem + _SCALE)
            way = "tensor" if scale is None or scale.shape in ((), (1,)) else "row"
            static = of_configuration == "static" or stem + ".input_scale" in header
            found.append(group_of(self.layout(f"{way}:{'static' if static else 'dynamic'}"), stem, header))
        check_consumed(found, header)
        return found

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        schemes = sorted({group.layout.name.partition(":")[2] for group in groups})
        if len(schemes) > 1:
            raise CheckpointError(
                "one configuration of autofp8 has one activation_scheme; some layers have static scales of inputs, and "
                "some have none",
                "calibrate all layers (quire.calibrate), or choose another dialect",
            )
        said = {"quant_method": METHOD, "activation_scheme": schemes[0] if schemes else "dynamic"}
        said["ignored_layers"] = sorted(plain)
        return {"config.json": {**base.get("config.json", {}), "quantization_config": said}}


def _said(configs: Configs) -> Mapping[str, Any]:
    return configs.get("config.json", {}).get("quantization_config") or {}
