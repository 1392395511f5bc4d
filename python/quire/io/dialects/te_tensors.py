"""Weights that TransformerEngine quantized (quantized_model_init), in a file of torch.save, for reading.

Buffers are those of quire, whose layouts are the same, but for scales: they are padded, and can be swizzled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.io.container import CheckpointError, Header
from quire.io.dialect import Configs, LayoutDialect
from quire.io.layout import Group, Layout, Part, StoredWeight, in_rows, padded
from quire.io.te_file import KEY, Inert
from quire.tensor import QuantizedTensor, TensorProto
from quire.tensor.buffers import DTYPES
from quire.tensor.origin import Origin

#: Values of TransformerEngine's enumeration of dtypes, of versions from 2.1 on.
_ELEMENTS = {7: "", 8: ":e5m2", 10: "", "kFloat8E4M3": "", "kFloat8E5M2": ":e5m2", "kFloat4E2M1": ""}
_KINDS = {"float8": "fp8_tensor", "float8_blockwise": "fp8_block", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_WRITE = "quire reads tensors of TransformerEngine and does not write them"


@dataclass(frozen=True)
class _Tensor(Group):
    """nominal: the dtype that the file says."""

    nominal: torch.dtype = torch.float32


def _layout(kind: str, spec: str, names: Mapping[str, str]) -> Layout:
    parts = [Part(role, f"#{role}", (), lambda shape: [shape], role) for role in names]
    return Layout(kind, spec, tuple(parts), dynamic=spec.partition(":")[0], parameter="")


class TeTensors(LayoutDialect):
    """The dialect "te"."""

    name = "te"
    read_only = True
    layouts = ()

    def detect(self, header: Header, configs: Configs) -> bool:
        return bool(configs.get(KEY))

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        return [_group(name, said, header) for name, said in configs[KEY].items()]

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        given = {role: tensor(name) for role, name in group.names.items()}
        layout, dtype = group.layout, getattr(group, "nominal", dtype)
        each = [way for way in ("rowwise", "columnwise") if f"{way}_data" in given]
        proto = TensorProto(group.shape, dtype, layout.spec, **{w: w in each for w in ("rowwise", "columnwise")})
        buffers = {}
        for place, (shape, kind) in proto.buffers().items():
            value = given.get(place)
            if value is None and layout.name == "float8" and place.endswith("amax"):  # which no product reads
                value = buffers[place.replace("amax", "scale")] * 448
            if value is None or value.dtype != kind:
                raise _damaged(group.name, f"{place} must be {kind}, got {None if value is None else value.dtype}")
            try:
                buffers[place] = _compact(layout.name, place, value, shape)
            except ValueError as error:
                raise _damaged(group.name, f"{place} {error}") from error
        weight = QuantizedTensor.from_buffers(buffers, layout.spec, group.shape, dtype)
        origin = Origin(
            self.name,
            layout.name,
            names=dict(group.names),
            dtypes={role: value.dtype for role, value in given.items()},
            shapes={role: tuple(value.shape) for role, value in given.items()},
        )
        return StoredWeight(weight, None, None, origin)

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        raise CheckpointError(_WRITE, "choose another dialect", tensor=name)

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        raise CheckpointError(_WRITE, "choose another dialect")


def _compact(kind: str, place: str, value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A buffer of quire, of one that can have padding and be swizzled. Raises ValueError if it is too small."""
    if not place.endswith("scale") or value.dim() != 2 or len(shape) != 2:
        if value.numel() != torch.Size(shape).numel():
            raise ValueError(f"must have {torch.Size(shape).numel()} elements, got {list(value.shape)}")
        return value.reshape(shape).contiguous()
    if value.shape[0] < shape[0] or value.shape[1] < shape[1]:
        raise ValueError(f"must be at least {list(shape)}, got {list(value.shape)}")
    if not kind.endswith(":swizzled"):
        return value[: shape[0], : shape[1]].contiguous()
    turned = place.startswith("columnwise") and kind.startswith("mxfp8")  # lines are columns, which come second
    lines, blocks = reversed(shape) if turned else shape
    if value.numel() != math.prod(padded(lines, blocks)):
        raise ValueError(f"must have {math.prod(padded(lines, blocks))} elements, got {list(value.shape)}")
    found = in_rows(value, lines, blocks)
    return found.t().contiguous() if turned else found


def _damaged(name: str, rule: str) -> CheckpointError:
    return CheckpointError(rule, "the file is damaged, or of a version that quire does not know", tensor=name)


def _group(name: str, said: Mapping[str, Any], header: Header) -> Group:
    kind, shape = said["kind"], said.get("shape")
    if not isinstance(shape, tuple) or not all(type(size) is int for size in shape) or len(shape) != 2:
        raise _damaged(name, f"a weight has two sizes, got {shape!r}")
    prefix = f"{name}#"
    names = {one.removeprefix(prefix): one for one in header if one.startswith(prefix)}
    spec = _spec(name, kind, said)
    if kind == "float8" and "columnwise_data" in names and "rowwise_data" not in names:
        names["columnwise_scale"] = names.pop("rowwise_scale")
    elif kind == "float8":
        names.pop("columnwise_data", None)
    # Columnwise codes of NVFP4 can be those of a Hadamard transform; only the quantizer says.
    if kind == "nvfp4" and "rowwise_data" in names and said.get("with_rht") is not False:
        names = {role: one for role, one in names.items() if role.startswith("rowwise")}
    for way in ("rowwise", "columnwise"):
        if f"{way}_data" not in names:
            names = {role: one for role, one in names.items() if not role.startswith(way)}
    if not names:
        raise _damaged(name, "the tensor has no data")
    if "rowwise_data" not in names and kind == "nvfp4":
        raise _damaged(name, "only columnwise codes are stored, and they may be those of a Hadamard transform")
    swizzled = ":swizzled" if said.get("swizzled") is True else ""
    layout, nominal = _layout(f"{kind}{swizzled}", spec, names), said.get("dtype")
    if nominal not in DTYPES:
        raise _damaged(name, f"dtype must be float32, float16 or bfloat16, got {nominal!r}")
    return _Tensor(name, layout, tuple(shape), names, nominal)


def _spec(name: str, kind: str, said: Mapping[str, Any]) -> str:
    element = said.get("element")
    value = element.args[0] if isinstance(element, Inert) and len(element.args) == 1 else None
    if type(value) not in (int, str) or value not in _ELEMENTS:
        raise _damaged(name, f"the element format must be E4M3, E5M2 or E2M1, got {value!r}")
    spec = _KINDS[kind] + _ELEMENTS[value]
    if kind == "float8_blockwise":
        return spec + (":128x128" if said.get("tiles") is True else "")
    if kind != "nvfp4":
        return spec
    if said.get("row_scaled") is True:
        return f"{spec}:row_scaled"
    if said.get("four_over_six") is True:
        mode = "mse" if said.get("nvfp4_4over6_err_mode") == "MSE" else "mae"
        return f"{spec}:4over6={mode}" + (":256" if said.get("largest_scale") == 256 else "")
    return f"{spec}:16x16" if said.get("with_2d_quantization") is True else spec
