"""Checkpoints of torchao (torchao.prototype.safetensors): tensor subclasses, flattened.

`X.weight` is in the file as `X._weight_qdata`, `X._weight_scale`, and for NVFP4 perhaps `X._weight_per_tensor_scale`
and `X._weight_act_per_tensor_scale`; all scales multiply. The header's metadata has the class and its attributes as
JSON under `X.weight`, and all names under `tensor_names`. Scales of blocks can be swizzled.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quire.io.container import METADATA, CheckpointError, Header
from quire.io.dialect import WORDS, Configs, LayoutDialect, check_consumed
from quire.io.dialects.deepseek import tiles
from quire.io.dialects.modelopt import NVFP4
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
    group_of,
    in_rows,
    in_tiles,
    packed,
    padded,
    scalar,
)

_NAMES = "tensor_names"
_PACKED = (BYTE, torch.float4_e2m1fn_x2)
_E5M2 = torch.float8_e5m2


def swizzled(size: int) -> ShapeRule:
    """Scales of 1 x size elements in tiles of 128 x 4. Stacks are one tall matrix or, with rows in multiples of 128,
    several."""

    def shapes(shape: Shape) -> list[Shape]:
        lines, columns = padded(torch.Size(shape[:-1]).numel(), -(-shape[-1] // size))
        one = [(lines // 4, columns * 4), (lines, columns), (lines * columns,)]
        stack = [(shape[0], lines // shape[0] // 4, columns * 4)] if len(shape) == 3 and shape[1] % 128 == 0 else []
        return [*stack, *one]

    return shapes


def one_scale(shape: Shape) -> Sequence[Shape]:
    """A scale for a matrix, in as many dimensions as the weight."""
    return [(*shape[:-2], 1, 1), *scalar(shape)]


def column(shape: Shape) -> Sequence[Shape]:
    """A scale for each row, in as many dimensions as the weight."""
    return [(*shape[:-1], 1), shape[:-1]]


def _layout(name: str, spec: str, data: Part, scale: Part, *others: Part) -> Layout:
    # torchao has no shorter last block. It derives the size of tiles from the counts of codes and scales, and gives
    # wrong values if the last tile is smaller.
    family, parts = spec.split(":")[0], (data, scale, *others, _BIAS)
    multiples = {"fp8_block": (128, 128), "mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16)}.get(family, (1, 1))
    return Layout(name, spec, parts, multiples=multiples, or_less=family == "fp8_block")


def _data(*dtypes: torch.dtype) -> Part:
    four_bit = dtypes == _PACKED
    return Part("data", "._weight_qdata", dtypes, packed if four_bit else codes, "rowwise_data")


def _scale(dtypes: tuple[torch.dtype, ...], shape: ShapeRule) -> Part:
    return Part("scale", "._weight_scale", dtypes, shape, "rowwise_scale")


def above_blocks(shape: Shape) -> Sequence[Shape]:
    """A scale above the scales of blocks, without dimensions."""
    return [*scalar(shape), (*shape[:-2], 1, 1)]


_GLOBAL = Part("global", "._weight_per_tensor_scale", (F32,), above_blocks, "rowwise_amax", optional=True)
_ACT = Part("input_scale", "._weight_act_per_tensor_scale", (F32,), above_blocks, "input_scale", optional=True)


_BIAS = Part("bias", ".bias", (), bias, "bias", optional=True)


def _layouts() -> tuple[Layout, ...]:
    found = []
    for element, dtype in (("", E4M3), (":e5m2", _E5M2)):
        for name, spec, shape in (
            ("tensor", f"fp8_tensor{element}", one_scale),
            ("row", f"fp8_row{element}", column),
            ("block", f"fp8_block{element}:128x128", tiles),
        ):
            found.append(_layout(f"Float8Tensor:{name}{element}", spec, _data(dtype), _scale(SCALES, shape)))
        for order, shape in (("", blocks(32)), (":swizzled", swizzled(32))):
            scale = _scale((E8M0, BYTE), shape)
            found.append(_layout(f"MXTensor:mxfp8{element}{order}", f"mxfp8{element}", _data(dtype), scale))
    for order, of_32, of_16 in (("", blocks(32), blocks(16)), (":swizzled", swizzled(32), swizzled(16))):
        found.append(_layout(f"MXTensor:mxfp4{order}", "mxfp4", _data(*_PACKED), _scale((E8M0, BYTE), of_32)))
        scale = _scale((E4M3, BYTE), of_16)
        found.append(_layout(f"NVFP4Tensor{order}", NVFP4, _data(*_PACKED), scale, _GLOBAL, _ACT))
    # With inputs that are quantized too.
    of_inputs = {"tensor": "fp8_tensor", "row": "fp8_row", "block": "fp8_block"}
    for layout in tuple(found):
        kind = layout.name.split(":")[1] if layout.name.startswith("Float8") else ""
        dynamic = of_inputs.get(kind) or {"mxfp8": "mxfp8", "mxfp4": "mxfp4"}.get(layout.spec.split(":")[0], "nvfp4")
        static = f"{NVFP4}:given" if layout.spec == NVFP4 else "none"
        found.append(dataclasses.replace(layout, name=f"{layout.name}:inputs", dynamic=dynamic, static=static))
    return tuple(found)


class TorchAo(LayoutDialect):
    """The dialect "torchao"."""

    name = "torchao"
    layouts = _layouts()
    # Its reader has no word for inputs in blocks of 1 x 128.
    offered = tuple(one for one in layouts if one.dynamic != "fp8_block")
    words = WORDS | {"inputs": "inputs are quantized"}

    def detect(self, header: Header, configs: Configs) -> bool:
        # Files that were converted to another dialect can still have these texts.
        return _NAMES in configs.get(METADATA, {}) and any(name.endswith("_qdata") for name in header)

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        metadata, found = configs[METADATA], []
        for name in _json(metadata, _NAMES, list):
            said = _json(metadata, name, dict)
            kind = said.get("_type")
            if kind == "Tensor":
                continue
            module, _, parameter = name.rpartition(".")
            layout = self.layout(_layout_name(name, kind, said.get("_data") or {}, header))
            parts = tuple(
                dataclasses.replace(part, suffix=part.suffix.replace("._weight_", f"._{parameter}_"))
                for part in layout.parts
            )
            data = header.get(f"{module}._{parameter}_qdata")
            stacked = data is not None and len(data.shape) == 3
            layout = dataclasses.replace(layout, parts=parts, parameter=f".{parameter}", stacked=stacked)
            group = group_of(layout, module, header)
            self._check_names(group, said, header)
            found.append(group)
        check_consumed(found, header)
        return found

    def _check_names(self, group: Group, said: Mapping[str, Any], header: Header) -> None:
        """Raises CheckpointError unless the file has the tensors that the metadata lists."""
        prefix = group.layout.parameter.replace(".", "._") + "_"
        roles = {part.suffix.removeprefix(prefix): part.role for part in group.layout.parts}
        for field in said.get("_tensor_data_names") or ():
            role = roles.get(field)
            if role not in group.names:
                stem, attribute = group.name.rpartition(".")[::2]
                raise CheckpointError(
                    f"the metadata of {group.name} lists the tensor, "
                    + ("which quire does not know" if role is None else "which the file does not have"),
                    "download the file again, or export the model with a newer quire",
                    file=header[group.names["data"]].file,
                    tensor=f"{stem}._{attribute}_{field}",
                )

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        shape, given = group.shape, {role: tensor(name) for role, name in group.names.items()}
        rows, size = torch.Size(shape[:-1]).numel(), 16 if group.layout.spec == NVFP4 else 32
        values, names = dict(given), dict(group.names)
        if ":swizzled" in group.layout.name:
            scale = given["scale"]
            values["scale"] = in_rows(scale.view(BYTE), rows, -(-shape[-1] // size)).view(scale.dtype)
            values["scale"] = values["scale"].reshape(*shape[:-1], -1)
        if group.layout.spec == NVFP4 and "global" not in names:
            names["global"], values["global"] = "", torch.ones((), dtype=torch.float32, device=given["data"].device)
        by_name = {name: values[role] for role, name in names.items()}
        stored = super().read(dataclasses.replace(group, names=names), by_name.__getitem__, dtype)
        origin = dataclasses.replace(
            stored.origin,
            names=dict(group.names),
            dtypes={role: value.dtype for role, value in given.items()},
            shapes={role: tuple(value.shape) for role, value in given.items()},
        )
        return dataclasses.replace(stored, origin=origin)

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        origin = stored.origin
        of_file = origin.names if origin.dialect == self.name else {}
        if not of_file and not name.endswith(layout.parameter):
            raise CheckpointError(
                "quire writes new layers of torchao only under names that end in .weight", _OTHER, tensor=name
            )
        if ":swizzled" not in layout.name:
            found = super().write(name, stored, layout)
        else:
            shapes = {role: size for role, size in origin.shapes.items() if role != "scale"}
            compact = (*stored.shape[:-1], stored.weight.rowwise_scale.shape[-1])
            rows = dataclasses.replace(origin, shapes={**shapes, "scale": compact})
            plain = self.layout(layout.name.replace(":swizzled", "")) if not origin.shapes else layout
            found = super().write(name, dataclasses.replace(stored, origin=rows), layout if origin.shapes else plain)
            part = layout.part("scale")
            key = origin.names.get("scale", name.removesuffix(layout.parameter) + part.suffix)
            size = origin.shapes.get("scale") or layout.shapes(part, tuple(stored.shape))[0]
            found[key] = in_tiles(found[key].flatten(0, -2)).reshape(size)
        return {key: value for key, value in found.items() if not of_file or key in of_file.values()}

    def texts(
        self, metadata: Mapping[str, str], entries: Mapping[str, tuple[StoredWeight | torch.Tensor, Layout | None]]
    ) -> dict[str, str]:
        """The texts of the header to be written: the texts of the file if all layers were read from one, else new ones.
        entries: name -> what is written, perhaps on the meta device, and its layout if it is quantized."""
        read = [value.origin.dialect == self.name for value, layout in entries.values() if layout is not None]
        found = {name: _described(name, value, layout) for name, (value, layout) in entries.items()}
        with_bias = [name for name, (value, layout) in entries.items() if layout is not None and value.bias is not None]
        found |= {f"{name.rpartition('.')[0]}.bias": {"_type": "Tensor"} for name in with_bias}
        if _NAMES in metadata and all(read) and set(_json(metadata, _NAMES, list)) == set(found):
            return dict(metadata)
        return {name: json.dumps(said) for name, said in found.items()} | {_NAMES: json.dumps(list(found))}

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        # The header describes the layers; what files of another dialect say of them ends.
        model = dict(base.get("config.json", {}))
        if (model.get("quantization_config") or {}).get("quant_method") != self.name:
            model.pop("quantization_config", None)
        return {"config.json": model} if "config.json" in base else {}


_OTHER = 'choose another dialect ("quire" has every spec)'


def _described(name: str, value: StoredWeight | torch.Tensor, layout: Layout | None) -> dict[str, Any]:
    """What torchao's own encoder says of a tensor: class, attributes, and the tensors of it that the file has."""
    if layout is None:
        return {"_type": "Tensor"}
    words, shape = layout.name.split(":"), list(value.shape)
    said, fields, dtype = {"act_quant_kwargs": None}, ["qdata", "scale"], _enum("torch.dtype", value.weight.dtype)
    if words[-1] == "inputs":
        said["act_quant_kwargs"] = _of_inputs(name, words, value.weight.spec)
    if words[0] == "Float8Tensor":
        size = {"tensor": shape, "row": [1, shape[-1]], "block": [128, 128]}[words[1]]
        said |= {"block_size": size, "mm_config": None, "kernel_preference": _enum("KernelPreference", "AUTO")}
        return {"_type": words[0], "_data": said | {"dtype": dtype}, "_tensor_data_names": fields}
    said |= {"is_swizzled_scales": "swizzled" in words, "orig_dtype": dtype}
    if words[0] == "MXTensor":
        said |= {"block_size": 32, "elem_dtype": _enum("torch.dtype", _element(words))}
        said["kernel_preference"] = _enum("KernelPreference", "EMULATED")
        return {"_type": words[0], "_data": said, "_tensor_data_names": fields}
    said |= {"block_size": 16, "use_triton_kernel": False}
    static = ["act_per_tensor_scale"] if value.input_scale is not None else []
    names = value.origin.names if value.origin.dialect == TorchAo.name and value.origin.names else {"global": ""}
    above = ["per_tensor_scale"] if "global" in names else []
    return {"_type": words[0], "_data": said, "_tensor_data_names": [*above, *static, *fields]}


def _enum(kind: str, value: object) -> dict[str, str]:
    return {"_type": kind, "_data": str(value).removeprefix("torch.")}


def _element(words: Sequence[str]) -> str:
    return "float4_e2m1fn_x2" if "mxfp4" in words else "float8_e5m2" if "e5m2" in words else "float8_e4m3fn"


def _of_inputs(name: str, words: Sequence[str], spec: str) -> dict[str, Any]:
    """How torchao quantizes the layer's inputs. Fields that are not said have torchao's defaults."""
    if words[0] == "NVFP4Tensor":
        return {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {}}
    if words[0] == "MXTensor":
        said = {"elem_dtype": _enum("torch.dtype", _element(words))}
        return {
            "_type": "QuantizeTensorToMXKwargs",
            "_data": said | {"kernel_preference": _enum("KernelPreference", "EMULATED")},
        }
    if words[1] == "block":
        raise CheckpointError(
            f"torchao's safetensors cannot say that inputs of w={spec} are quantized in blocks: its reader has none",
            _OTHER,
            tensor=name,
        )
    granularity = {"_type": "PerTensor" if words[1] == "tensor" else "PerRow", "_data": {}}
    said = {"float8_dtype": _enum("torch.dtype", _element(words)), "granularity": granularity}
    return {"_type": "QuantizeTensorToFloat8Kwargs", "_data": said}


def _json(metadata: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        value = json.loads(metadata[name])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the metadata of the file has no JSON for {name!r}", "export the model again", tensor=name
        ) from error
    if not isinstance(value, kind):
        raise CheckpointError(
            f"the metadata must be a JSON {kind.__name__}, got {type(value).__name__}",
            "export the model again",
            tensor=name,
        )
    return value


def _layout_name(name: str, kind: object, said: Mapping[str, Any], header: Header) -> str:
    order = ":swizzled" if said.get("is_swizzled_scales") else ""
    inputs = ":inputs" if said.get("act_quant_kwargs") is not None else ""
    module, _, parameter = name.rpartition(".")
    data = header.get(f"{module}._{parameter}_qdata")
    element = ":e5m2" if data is not None and data.dtype == _E5M2 else ""
    if kind == "NVFP4Tensor" and said.get("block_size") == 16:
        return f"NVFP4Tensor{order}{inputs}"
    if kind == "MXTensor" and said.get("block_size") == 32:
        of = (said.get("elem_dtype") or {}).get("_data")
        spec = {"float8_e4m3fn": "mxfp8", "float8_e5m2": "mxfp8:e5m2", "float4_e2m1fn_x2": "mxfp4"}.get(of)
        if spec:
            return f"MXTensor:{spec}{order}{inputs}"
    if kind == "Float8Tensor" and data is not None:
        size = list(said.get("block_size") or ())[-2:]
        shape = list(data.shape)[-2:]
        found = "tensor" if size == shape else "row" if size == [1, shape[-1]] else "block" if size == [128] * 2 else ""
        if found:
            return f"Float8Tensor:{found}{element}{inputs}"
    raise CheckpointError(
        f"quire does not read {kind} with {dict(said)}",
        "export the model with Float8Tensor, MXTensor or NVFP4Tensor",
        tensor=name,
    )
