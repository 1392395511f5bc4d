"""Checkpoints with quant_method "fbgemm_fp8": FP8 with a scale for each row, which multiplies.

The configuration has `activation_scale_ub`, an upper limit of the amax of a row of the input. quire keeps it and does
not apply it: rows whose amax is above are quantized by their own amax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.io.container import Header
from quire.io.dialect import Configs, LayoutDialect, check_consumed
from quire.io.layout import E4M3, SCALES, Group, Layout, Part, Shape, bias, codes, group_of

METHOD = "fbgemm_fp8"


def column(shape: Shape) -> Sequence[Shape]:
    """A scale for each row, as a matrix of one column."""
    return [(*shape[:-1], 1)]


_ROWS = Layout(
    "fp8_row",
    "fp8_row",
    (
        Part("data", ".weight", (E4M3,), codes, "rowwise_data"),
        Part("scale", ".weight_scale", SCALES, column, "rowwise_scale"),
        Part("bias", ".bias", (), bias, "bias", optional=True),
    ),
    dynamic="fp8_row",
)
# Llama 4: all experts in one tensor [E, K, N].
_EXPERTS = dataclasses.replace(
    _ROWS,
    name="fp8_row:experts",
    parts=tuple(
        dataclasses.replace(part, suffix=suffix)
        for part, suffix in zip(_ROWS.parts, ("", "_scale", "_bias"), strict=True)
    ),
    parameter="",
    transposed=True,
    stacked=True,
)


class Fbgemm(LayoutDialect):
    """The dialect "fbgemm_fp8"."""

    name = METHOD
    layouts = (_ROWS, _EXPERTS)

    def detect(self, header: Header, configs: Configs) -> bool:
        said = configs.get("config.json", {}).get("quantization_config") or {}
        return str(said.get("quant_method", "")).lower() == METHOD

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        found = []
        for name, entry in header.items():
            if entry.dtype == E4M3:
                stacked = len(entry.shape) == 3
                stem = name if stacked else name.removesuffix(".weight")
                found.append(group_of(_EXPERTS if stacked else _ROWS, stem, header))
        check_consumed(found, header)
        return found

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        said = {"quant_method": METHOD, "activation_scale_ub": 1200.0, "modules_to_not_convert": sorted(plain)}
        return {"config.json": {**base.get("config.json", {}), "quantization_config": said}}
