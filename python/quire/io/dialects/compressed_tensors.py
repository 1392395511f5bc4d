"""Checkpoints of compressed-tensors (llm-compressor).

Global scales divide; all other scales multiply, in float32 or in the dtype of the model. A layout is named by the
format, how the weight is scaled, and how the input is: "float-quantized:channel:token".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.io.container import CheckpointError, Header
from quire.io.dialect import WORDS, Configs, LayoutDialect, check_consumed
from quire.io.layout import (
    BYTE,
    DIV,
    E4M3,
    E8M0,
    F32,
    SCALES,
    ZERO_POINTS,
    Group,
    Layout,
    Part,
    Shape,
    bias,
    blocks,
    codes,
    group_of,
    missing_inputs,
    packed,
)

#: Spec of the weight: the amax of the buffer is the file's weight_global_scale, which divides.
NVFP4 = f"nvfp4:{DIV}"
#: Specs of an input with a stored scale.
STATIC_NVFP4, STATIC_FP8 = f"nvfp4:{DIV}:given", "fp8_tensor:given"


def one(shape: Shape) -> Sequence[Shape]:
    """One scale, in one dimension."""
    return [(1,), ()]


def channel(shape: Shape) -> Sequence[Shape]:
    """A scale for each row, as a column."""
    return [(shape[0], 1), (shape[0],)]


def tiles(shape: Shape) -> Sequence[Shape]:
    """A scale for 128 x 128 elements."""
    return [(-(-shape[0] // 128), -(-shape[1] // 128))]


_LAST = (Part("bias", ".bias", (), bias, "bias", optional=True), *ZERO_POINTS)
_PACKED = Part("data", ".weight_packed", (BYTE,), packed, "rowwise_data")
_CODES = Part("data", ".weight", (E4M3,), codes, "rowwise_data")
_GLOBAL = Part("global", ".weight_global_scale", (F32,), one, "rowwise_amax")
_GLOBAL_INPUT = Part("input_scale", ".input_global_scale", (F32,), one, "input_scale")
_INPUT = Part("input_scale", ".input_scale", SCALES, one, "input_scale")


def _scale(dtypes: tuple, shape: Any) -> Part:
    return Part("scale", ".weight_scale", dtypes, shape, "rowwise_scale")


def _layouts() -> Iterator[Layout]:
    of_nvfp4 = (_PACKED, _scale((E4M3,), blocks(16)), _GLOBAL)
    name = "nvfp4-pack-quantized:tensor_group"
    # The tool wants whole blocks of a row; of tiles it pads the last ones.
    weights_only = Layout(f"{name}:none", NVFP4, (*of_nvfp4, *_LAST), multiples=(1, 16))
    yield replace(
        weights_only,
        name=f"{name}:local",
        parts=(*of_nvfp4, _GLOBAL_INPUT, *_LAST),
        static=STATIC_NVFP4,
        dynamic="nvfp4",
        input_divides=True,
    )
    yield weights_only
    for spec, name, data in (
        ("mxfp4", "mxfp4-pack-quantized", _PACKED),
        ("mxfp8", "mxfp8-quantized", _CODES),
    ):
        parts = (data, _scale((BYTE, E8M0), blocks(32)), *_LAST)
        yield Layout(f"{name}:group:group", spec, parts, dynamic=spec, multiples=(1, 32))
        yield Layout(f"{name}:group:none", spec, parts, multiples=(1, 32))
    weights = {"tensor": ("fp8_tensor", one), "channel": ("fp8_row", channel), "block": ("fp8_block:128x128", tiles)}
    inputs = {"token": "fp8_row", "group": "fp8_block", "tensor": "fp8_tensor", "none": "none"}
    for name in ("float-quantized", "naive-quantized"):
        for way, (spec, shape) in weights.items():
            parts = (_CODES, _scale(SCALES, shape))
            yield Layout(f"{name}:{way}:static", spec, (*parts, _INPUT, *_LAST), STATIC_FP8, dynamic="fp8_tensor")
            for kind, dynamic in inputs.items():
                yield Layout(f"{name}:{way}:{kind}", spec, (*parts, *_LAST), dynamic=dynamic)


LAYOUTS = tuple(_layouts())
#: The strategy of the weight and that of the inputs, the second and the third part of a layout's name.
_OF_WEIGHT = {
    "tensor": WORDS["tensor"],
    "channel": WORDS["row"],
    "group": "a scale for each block of a row of the weight",
    "block": WORDS["block"],
    "tensor_group": "a scale for each block of a row of the weight, and a global one",
}
_OF_INPUTS = {
    "static": WORDS["static"],
    "token": "each row of the inputs gets a scale in each call",
    "group": "each block of a row of the inputs gets a scale in each call",
    "tensor": "the inputs get one scale in each call",
    "local": "each block of a row of the inputs gets a scale in each call, and their global scale is in the file",
    "none": "inputs are not quantized",
}
_ENDINGS = sorted({part.suffix for layout in LAYOUTS for part in layout.parts})
_FORMATS = sorted({layout.name.partition(":")[0] for layout in LAYOUTS})


class CompressedTensors(LayoutDialect):
    """The dialect "compressed-tensors"."""

    name = "compressed-tensors"
    layouts = LAYOUTS

    def meaning(self, layout: str) -> str:
        _, weight, inputs = layout.split(":")
        return f"{_OF_WEIGHT[weight]}; {_OF_INPUTS[inputs]}"

    def detect(self, header: Header, configs: Configs) -> bool:
        said = _said(configs)
        return said.get("quant_method") == self.name or (
            "quant_method" not in said and any(name.endswith(".weight_packed") for name in header)
        )

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        said = _said(configs)
        _refuse(said)
        found = []
        for name, entry in header.items():
            stem, _, last = name.rpartition(".")
            if entry.dtype not in (BYTE, E4M3) or last not in ("weight", "weight_packed"):
                continue
            if any(names(stem, pattern) for pattern in said.get("ignore") or ()):
                raise CheckpointError(
                    f"the configuration's `ignore` names the layer, and the tensor is {entry}",
                    "the configuration or the file is of another model; export it again",
                    file=entry.file,
                    tensor=name,
                )
            schemes = list(_schemes(stem, said))
            if not schemes:
                raise CheckpointError(
                    f"no target of config_groups matches the layer, and the tensor is {entry}",
                    "config.json is missing or of another model; download it again",
                    file=entry.file,
                    tensor=name,
                )
            found.append(_first_that_fits(stem, schemes, header))
        check_consumed(found, header)
        return found

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        kinds: dict[str, list[str]] = {}
        for group in groups:
            kinds.setdefault(group.layout.name, []).append(group.stem)
        formats = [name.partition(":")[0] for name in kinds]
        of_kinds = {
            f"group_{number}": {
                "targets": ["Linear"] if len(kinds) == 1 else stems,
                "weights": _weights(kind),
                "input_activations": _inputs(kind),
                "output_activations": None,
                "format": kind.partition(":")[0],
            }
            for number, (kind, stems) in enumerate(kinds.items())
        }
        said = {
            "quant_method": self.name,
            "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": of_kinds,
            "ignore": sorted(plain),
            "kv_cache_scheme": None,
        }
        return {"config.json": {**base.get("config.json", {}), "quantization_config": said}}


def _said(configs: Configs) -> Mapping[str, Any]:
    config = configs.get("config.json", {})
    return config.get("quantization_config") or config.get("compression_config") or {}


def names(stem: str, target: str) -> bool:
    """Whether a target is the name of a layer, or "re:" and a pattern that matches at its start."""
    return re.match(target[3:], stem) is not None if target.startswith("re:") else target == stem


def is_class(target: str) -> bool:
    """Whether a target is the name of a class. A file does not say which layers have this class, so dtypes decide."""
    return target.isidentifier() and target[0].isupper()


def _schemes(stem: str, said: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The groups that match a layer, with their ranks: first groups that name it, then patterns, then classes."""
    groups = [group for group in (said.get("config_groups") or {}).values() if isinstance(group, Mapping)]

    def rank(group: Mapping[str, Any]) -> int:
        found = [target for target in group.get("targets") or () if names(stem, target) or is_class(target)]
        ranks = [0 if target == stem else 1 if target.startswith("re:") else 2 for target in found]
        return min(ranks, default=3)

    for group in sorted(groups, key=rank):
        if rank(group) < 3:
            yield (
                rank(group),
                {"format": said.get("format"), **{key: value for key, value in group.items() if value is not None}},
            )


def _first_that_fits(stem: str, schemes: Sequence[tuple[int, Mapping[str, Any]]], header: Header) -> Group:
    """Groups can overlap: of the best rank whose tensors are there, the first group that has all tensors of the layer
    and lacks none, else the first. So static and dynamic inputs are told apart. Raises the error of the first group if
    none fits."""
    there = {stem + ending for ending in _ENDINGS if stem + ending in header}
    fitting: dict[int, list[Group]] = {}
    errors = []
    for rank, scheme in schemes:
        try:
            fitting.setdefault(rank, []).append(group_of(_layout(stem, scheme, header), stem, header))
        except CheckpointError as error:
            errors.append(error)
    if not any(fitting.values()):
        raise errors[0]
    best = next(filter(None, fitting.values()))
    return next((one for one in best if not missing_inputs([one]) and there <= set(one.names.values())), best[0])


def _layout(stem: str, scheme: Mapping[str, Any], header: Header) -> Layout:
    weights, inputs = scheme.get("weights") or {}, scheme.get("input_activations")
    kind, way = scheme.get("format"), weights.get("strategy")
    if kind not in _FORMATS:  # older files have none, or "mixed-precision" and none in the group
        kind = kind if kind not in (None, "mixed-precision") else _format_of(weights)
    name = f"{kind}:{way}:{_of_inputs(kind, inputs)}"
    found = next((layout for layout in LAYOUTS if layout.name == name), None)
    sizes = weights.get("block_structure")
    # Zero points are accepted here; check_zero_points() raises an error unless they are zero.
    unknown = weights.get("symmetric") is False and stem + ".weight_zero_point" not in header
    if found is None or (way == "block" and list(sizes or ()) != [128, 128]) or unknown:
        raise CheckpointError(
            f"{name} {'' if way != 'block' else sizes} is not supported: weights {dict(weights)}; supported are "
            f"{', '.join(_FORMATS)}, with tiles of 128 x 128 and without zero points",
            "export the model in one of these",
            tensor=stem,
        )
    return found


def _format_of(weights: Mapping[str, Any]) -> str:
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if kind == "float" and bits == 4:
        return "nvfp4-pack-quantized" if size == 16 else "mxfp4-pack-quantized"
    if kind == "float" and bits == 8:
        return "mxfp8-quantized" if weights.get("strategy") == "group" and size == 32 else "float-quantized"
    return f"{kind}{bits}"


def _of_inputs(kind: str, inputs: Mapping[str, Any] | None) -> str:
    if not inputs:
        return "none"
    dynamic, way = inputs.get("dynamic", False), inputs.get("strategy")
    if kind.startswith("nvfp4"):
        return "local"
    return "static" if dynamic is False and way == "tensor" else str(way)


def _refuse(said: Mapping[str, Any]) -> None:
    """Raises CheckpointError for settings that change what layers compute."""
    if (said.get("transform_config") or {}).get("config_groups"):
        raise CheckpointError(
            "config.json has a transform_config: inputs are rotated before products, which quire does not support",
            "export the model without transforms",
        )
    sparse = (said.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise CheckpointError(f"sparsity_config {sparse} is not supported", "export the model without sparsity")


def _weights(name: str) -> dict[str, Any]:
    kind, way, _ = name.split(":")
    size = 16 if kind.startswith("nvfp4") else 32 if kind.startswith("mx") else None
    said = {"num_bits": 4 if "pack" in kind else 8, "type": "float", "strategy": way, "symmetric": True}
    said |= {"dynamic": False, "group_size": size, "block_structure": [128, 128] if way == "block" else None}
    return said


def _inputs(name: str) -> dict[str, Any] | None:
    kind, _, way = name.split(":")
    if way == "none":
        return None
    size = 16 if kind.startswith("nvfp4") else 32 if kind.startswith("mx") else 128 if way == "group" else None
    said = {"num_bits": 4 if "pack" in kind else 8, "type": "float", "symmetric": True, "group_size": size}
    strategy = {"static": "tensor", "local": "tensor_group"}.get(way, way)
    return said | {"strategy": strategy, "dynamic": {"static": False, "local": "local"}.get(way, True)}
