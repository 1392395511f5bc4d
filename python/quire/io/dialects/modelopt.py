"""Checkpoints of NVIDIA ModelOpt (export_hf_checkpoint): all scales multiply, and static scales of inputs too.

A layer is `X.weight`, `X.weight_scale`, `X.weight_scale_2`, `X.input_scale`. Experts are layers of their own, except
for models whose experts are one tensor `X.gate_up_proj`, which has [E, K, N] and scales `X.gate_up_proj_weight_scale`.
The configuration is in hf_quant_config.json, in newer exports in config.json too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from quire.io.container import CheckpointError, Entry, Header
from quire.io.dialect import WORDS, Configs, LayoutDialect, check_consumed
from quire.io.layout import (
    BYTE,
    E4M3,
    E8M0,
    F32,
    MUL,
    Group,
    Layout,
    Part,
    Shape,
    ShapeRule,
    bias,
    blocks,
    codes,
    group_of,
    packed,
    row,
    scalar,
)

#: Specs of the weight. The amax of the buffer is the file's weight_scale_2, which multiplies.
NVFP4 = f"nvfp4:{MUL}"
#: Specs of an input with a stored scale.
STATIC_NVFP4, STATIC_FP8 = f"nvfp4:{MUL}:given", "fp8_tensor:given"


def tiles(shape: Shape) -> Sequence[Shape]:
    """A scale for 128 x 128 elements, in four dimensions; without dimensions if one tile covers everything."""
    rows, columns = -(-shape[0] // 128), -(-shape[1] // 128)
    return [(rows, 1, columns, 1), *([()] if rows == columns == 1 else [])]


def _parts(dtype: torch.dtype, shape: ShapeRule, *others: Part) -> tuple[Part, ...]:
    return (
        Part("data", ".weight", (dtype,), shape, "rowwise_data"),
        *others,
        Part("bias", ".bias", (), bias, "bias", optional=True),
    )


def _scale(dtypes: tuple[torch.dtype, ...], shape: ShapeRule) -> Part:
    return Part("scale", ".weight_scale", dtypes, shape, "rowwise_scale")


_GLOBAL = Part("global", ".weight_scale_2", (F32,), scalar, "rowwise_amax")
_INPUT = Part("input_scale", ".input_scale", (F32,), scalar, "input_scale")
_UNUSED_INPUT = Part("unused_input_scale", ".input_scale", (F32,), scalar, "verbatim", optional=True)
_BLOCKS_OF_16 = _scale((E4M3,), blocks(16))


def _experts(of: Layout) -> Layout:
    """The layout with all experts in one tensor."""
    suffixes = {".weight": "", ".bias": "_bias"}
    parts = tuple(
        Part(p.role, suffixes.get(p.suffix, p.suffix.replace(".", "_")), p.dtypes, p.shapes, p.place, p.optional)
        for p in of.parts
    )
    return replace(of, name=f"{of.name}:experts", parts=parts, parameter="", transposed=True, stacked=True)


def _nvfp4(name: str, *inputs: Part, static: str = "none", dynamic: str = "none") -> Layout:
    parts = _parts(BYTE, packed, _BLOCKS_OF_16, _GLOBAL, *inputs)
    return Layout(name, NVFP4, parts, static=static, dynamic=dynamic, multiples=(1, 16))


def _fp8(name: str, spec: str, *others: Part, static: str = "none", dynamic: str = "none") -> Layout:
    return Layout(name, spec, _parts(E4M3, codes, *others), static=static, dynamic=dynamic)


_NVFP4 = _nvfp4("NVFP4", _INPUT, static=STATIC_NVFP4, dynamic="nvfp4")
_FP8 = _fp8("FP8", "fp8_tensor", _scale((F32,), scalar), _INPUT, static=STATIC_FP8, dynamic="fp8_tensor")
LAYOUTS: tuple[Layout, ...] = (
    _NVFP4,
    _experts(_NVFP4),
    _nvfp4("W4A16_NVFP4", _UNUSED_INPUT),
    _nvfp4("W4A8_NVFP4_FP8", _INPUT, static=STATIC_FP8, dynamic="fp8_tensor"),
    _FP8,
    _experts(_FP8),
    _fp8("FP8:rows", "fp8_row", _scale((F32,), row), _INPUT, static=STATIC_FP8, dynamic="fp8_tensor"),
    _fp8("FP8_PER_CHANNEL_PER_TOKEN", "fp8_row", _scale((F32,), row), dynamic="fp8_row"),
    _fp8("FP8_PB_WO", "fp8_block:128x128", _scale((F32,), tiles)),
    # ModelOpt's decoder pads a shorter last block, but its exporter refuses to write one.
    replace(_fp8("MXFP8", "mxfp8", _scale((BYTE, E8M0), blocks(32)), dynamic="mxfp8"), multiples=(1, 32)),
)
_BY_NAME = {layout.name: layout for layout in LAYOUTS}
#: Names of the weights of all experts in one tensor.
_EXPERTS = {"gate_up_proj", "down_proj"}


class ModelOpt(LayoutDialect):
    """The dialect "modelopt"."""

    name = "modelopt"
    layouts = LAYOUTS
    words = WORDS | {"rows": WORDS["row"]}

    def detect(self, header: Header, configs: Configs) -> bool:
        of_model = configs.get("config.json", {}).get("quantization_config") or {}
        return (
            "hf_quant_config.json" in configs
            or str(of_model.get("quant_method", "")).lower() == "modelopt"
            or any(name.endswith("weight_scale_2") for name in header)
        )

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        quantization = Quantization.of(configs)
        calibrated = any(name.endswith("input_scale") for name in header)
        found = []
        for name, entry in header.items():
            stacked = len(entry.shape) == 3 and name.rpartition(".")[2] in _EXPERTS
            if entry.dtype not in (BYTE, E4M3) or not (stacked or name.endswith(".weight")):
                continue
            stem = name.removesuffix(".weight")
            _refuse(stem, header)
            algorithm = quantization.algorithm(stem) or _guess(stem, entry, header, calibrated)
            if quantization.excludes(stem):
                raise CheckpointError(
                    f"the configuration ({quantization.file}) excludes the layer from quantization, and the tensor is "
                    f"{entry}",
                    "the configuration or the file is of another model; export it again",
                    file=entry.file,
                    tensor=name,
                )
            found.append(group_of(_layout(algorithm, stem, header, stacked=stacked), stem, header))
        check_consumed(found, header)
        return found

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        kinds = sorted({_algorithm(group.layout) for group in groups})
        said: dict[str, Any] = {"quant_algo": kinds[0] if len(kinds) == 1 else "MIXED_PRECISION"}
        said |= {"kv_cache_quant_algo": None, "exclude_modules": sorted(plain)}
        if len(kinds) == 1:
            said |= _size(kinds[0])
        else:
            each = {group.stem: _algorithm(group.layout) for group in groups}
            said["quantized_layers"] = {stem: {"quant_algo": kind, **_size(kind)} for stem, kind in each.items()}
        producer = {"name": "quire"}
        own = {"ignore" if key == "exclude_modules" else key: value for key, value in said.items()}
        model = {**base.get("config.json", {})}
        model["quantization_config"] = {"quant_method": "modelopt", "producer": producer, **own}
        return {"config.json": model, "hf_quant_config.json": {"producer": producer, "quantization": said}}


def _size(algorithm: str) -> dict[str, int]:
    return {"group_size": 16} if "NVFP4" in algorithm else {}


def _algorithm(layout: Layout) -> str:
    return layout.name.partition(":")[0]


def _layout(algorithm: str, stem: str, header: Header, *, stacked: bool) -> Layout:
    """The layout of a layer under an algorithm, by its tensors."""
    if algorithm not in _BY_NAME:
        known = ", ".join(sorted({_algorithm(layout) for layout in LAYOUTS}))
        raise CheckpointError(
            f"quant_algo {algorithm} is not supported; supported are {known}",
            "export the model with one of these",
            tensor=stem,
        )
    if stacked:
        return _BY_NAME.get(f"{algorithm}:experts", _BY_NAME[algorithm])
    scale = header.get(stem + ".weight_scale")
    per_row = algorithm == "FP8" and scale is not None and scale.shape not in ((), (1,))
    return _BY_NAME["FP8:rows" if per_row else algorithm]


def _guess(stem: str, entry: Entry, header: Header, calibrated: bool) -> str:
    """The algorithm of a layer that the configuration does not mention."""
    if entry.dtype == BYTE:
        return "NVFP4" if calibrated else "W4A16_NVFP4"
    scale = header.get(stem + ".weight_scale")
    if scale is None or scale.shape in ((), (1,)) or len(entry.shape) == 3:
        return "FP8"
    if scale.dtype in (BYTE, E8M0):
        return "MXFP8"
    return "FP8_PB_WO" if len(scale.shape) == 4 else "FP8_PER_CHANNEL_PER_TOKEN"


def _refuse(stem: str, header: Header) -> None:
    """Raises CheckpointError for methods that change what a layer computes."""
    for suffix, method in ((".pre_quant_scale", "AWQ (pre_quant_scale)"), (".svdquant_lora_a", "SVDQuant")):
        if stem + suffix in header:
            raise CheckpointError(
                f"the layer is quantized by {method}, whose inputs are transformed before the product; quire does not "
                "support it",
                "export the model with NVFP4 or FP8",
                file=header[stem + suffix].file,
                tensor=stem + suffix,
            )


class Quantization:
    """What the configurations say. file: where."""

    def __init__(self, file: str, said: Mapping[str, Any]) -> None:
        self.file = file
        self.default = _upper(said.get("quant_algo"))
        excluded = said.get("exclude_modules", said.get("ignore")) or ()
        self.excluded = [pattern for pattern in excluded if isinstance(pattern, str)]
        layers = said.get("quantized_layers") or {}
        self.layers = {name: _upper(each.get("quant_algo")) for name, each in layers.items()}

    @classmethod
    def of(cls, configs: Configs) -> Quantization:
        """Raises CheckpointError if two files contradict each other."""
        new = configs.get("config.json", {}).get("quantization_config") or {}
        old = configs.get("hf_quant_config.json", {}).get("quantization") or {}
        one, other = cls("config.json", new), cls("hf_quant_config.json", old)
        if None not in (one.default, other.default) and one.default != other.default:
            raise CheckpointError(
                f"config.json says quant_algo {one.default}, hf_quant_config.json {other.default}",
                "one of the files is of another export; download both again",
            )
        found = one if one.default is not None or one.layers else other
        found.layers = found.layers or other.layers
        return found

    def algorithm(self, stem: str) -> str | None:
        """The algorithm of a layer; None if the configuration does not mention the layer."""
        return self.layers.get(stem) if self.default == "MIXED_PRECISION" else self.default

    def excludes(self, stem: str) -> bool:
        """Whether a pattern names the layer, or a module around it. Older exports have parts of names too, which are
        not read as patterns here: "mlp.gate" would name gate_proj. They are advice, since dtypes decide."""
        around = [stem]
        while "." in around[-1]:
            around.append(around[-1].rpartition(".")[0])
        return any(fnmatchcase(name, pattern) for name in around for pattern in self.excluded)


def _upper(algorithm: object) -> str | None:
    return algorithm.upper() if isinstance(algorithm, str) else None
