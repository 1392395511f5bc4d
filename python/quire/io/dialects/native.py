"""quire's own checkpoints, for every spec: the buffers of each weight under the names that quire.TrainingState gives
them, `X.weight.nvfp4:16x16.rowwise_data`, and a table of layers in config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quire.io.container import CheckpointError, Header
from quire.io.dialect import Configs, check_consumed
from quire.io.layout import DIV, F32, Group, Layout, Part, StoredWeight, scalar
from quire.tensor import BUFFER_NAMES, QuantizedStack, QuantizedTensor, TensorProto
from quire.tensor.origin import Origin

_BUFFER = re.compile(
    r"^(?P<name>.+?)\.(?P<spec>(?:fp8_\w+|mx\w+|nvfp4)(?::[^/]+)?)\.(?P<buffer>" + "|".join(BUFFER_NAMES) + ")$"
)
_NUMBERED = re.compile(r"(?P<stem>(?:.*[._])?)weight(?P<number>\d*)")
_REMEDY = "the file is damaged or was not written by quire; write it again"


def weight_of(name: str) -> str:
    """The name of the weight that a buffer of this dialect belongs to; other names as they are."""
    match = _BUFFER.match(name)
    return match["name"] if match else name


def without_layers(configs: Configs, left_out: Callable[[str], bool]) -> Configs:
    """The configurations without the layers of the table in config.json for whose names left_out is true."""
    config = configs.get("config.json", {})
    said = config.get("quantization_config") or {}
    if not isinstance(said.get("layers"), Mapping):
        return configs
    layers = {name: layer for name, layer in said["layers"].items() if not left_out(name)}
    return {**configs, "config.json": {**config, "quantization_config": {**said, "layers": layers}}}


class Native:
    """The dialect "quire"."""

    name = "quire"
    layouts: Sequence[Layout] = ()
    read_only = False

    def detect(self, header: Header, configs: Configs) -> bool:
        said = configs.get("config.json", {}).get("quantization_config") or {}
        return said.get("quant_method") == self.name or any(_BUFFER.match(name) for name in header)

    def groups(self, header: Header, configs: Configs) -> list[Group]:
        said = configs.get("config.json", {}).get("quantization_config") or {}
        layers = said.get("layers") or {}
        names: dict[tuple[str, str], dict[str, str]] = {}
        for name in header:
            if match := _BUFFER.match(name):
                names.setdefault((match["name"], match["spec"]), {})[match["buffer"]] = name
        found = [self._group(name, spec, each, (layers.get(name), header)) for (name, spec), each in names.items()]
        missing = sorted(layers.keys() - {group.name for group in found})
        if missing:
            raise CheckpointError("config.json lists the layer, and no tensor is of it", _REMEDY, tensor=missing[0])
        check_consumed(found, header)
        return found

    def _group(self, name: str, spec: str, names: dict[str, str], where: tuple[Any, Header]) -> Group:
        said, header = where
        first = header[next(iter(names.values()))]
        if not isinstance(said, Mapping) or said.get("spec") != spec:
            raise CheckpointError(
                f"config.json says {said} of the layer, and its buffers are of {spec}",
                _REMEDY,
                file=first.file,
                tensor=name,
            )
        try:
            shape = tuple(map(int, said["shape"]))
            directions = {way: f"{way}_data" in names for way in ("rowwise", "columnwise")}
            buffers = TensorProto(shape, torch.float32, spec, stacked=len(shape) == 3, **directions).buffers()
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"config.json says {said} of the layer: {error}", _REMEDY, tensor=name) from error
        for buffer in {**buffers, **names}:
            full = f"{name}.{spec}.{buffer}"
            got, wanted = header.get(full), buffers.get(buffer)
            if got is None or wanted is None or (got.shape, got.dtype) != wanted:
                problem = "the tensor is missing" if got is None else f"expected {wanted}, got {(got.shape, got.dtype)}"
                raise CheckpointError(problem, _REMEDY, file=first.file, tensor=full)
        beside = {role: full for role in ("bias", "input_scale") if (full := _beside(name, role)) in header}
        if said.get("has_input_scale") and "input_scale" not in beside:
            missing = _beside(name, "input_scale")
            raise CheckpointError("the tensor is missing", _REMEDY, file=first.file, tensor=missing)
        return Group(name, _own(spec, said), shape, names | beside)

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        layout, shape = group.layout, group.shape
        given = {role: tensor(name) for role, name in group.names.items()}
        buffers = {name: value for name, value in given.items() if name in BUFFER_NAMES}
        kind = QuantizedStack if len(shape) == 3 else QuantizedTensor
        weight = kind.from_buffers(buffers, layout.spec, shape, dtype)
        origin = Origin(self.name, layout.name, names=dict(group.names))
        return StoredWeight(weight, given.get("input_scale"), given.get("bias"), origin)

    def bias(self, group: Group, value: torch.Tensor) -> torch.Tensor:
        return value

    def layout(self, name: str) -> Layout | None:
        """The layout of a name that _own() has made."""
        said = dict(word.partition("=")[::2] for word in name.split(","))
        spec = said.pop("spec", "")
        return _own(spec, said) if said.keys() == set(_SAID) else None

    def choose(self, name: str, stored: StoredWeight, source: Layout | None, notes: list[str]) -> Layout:
        spec = stored.weight.spec_text
        layout = source or Layout("", spec, ())
        said = {key: getattr(layout, key) for key in ("dynamic", "static", "input_divides")}
        return _own(spec, said | {"has_input_scale": stored.input_scale is not None})

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        found = {f"{name}.{stored.weight.spec_text}.{key}": value for key, value in stored.weight.buffers().items()}
        beside = {"bias": stored.bias, "input_scale": stored.input_scale}
        return found | {_beside(name, key): value for key, value in beside.items() if value is not None}

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]:
        table = {
            group.name: {
                "spec": group.layout.spec,
                "shape": list(group.shape),
                "dynamic": group.layout.dynamic,
                "static": group.layout.static,
                "input_divides": group.layout.input_divides,
                "has_input_scale": group.layout.calibrated,
            }
            for group in groups
        }
        said = {"quant_method": self.name, "layers": table}
        return {"config.json": {**base.get("config.json", {}), "quantization_config": said}}


#: What config.json says about a layer beside spec and shape.
_SAID = ("dynamic", "static", "input_divides", "has_input_scale")


def bias_of(weight: str) -> str:
    """The name of the bias of a weight, as in a state dict: X.bias of X.weight, X.bias3 of X.weight3, fc1_bias of
    fc1_weight, and X_bias of a parameter X."""
    found = _NUMBERED.fullmatch(weight)
    return f"{found['stem']}bias{found['number']}" if found else f"{weight}_bias"


def _beside(weight: str, role: str) -> str:
    """The name of a tensor that belongs to a weight: its bias, or its static scale."""
    if role == "bias":
        return bias_of(weight)
    return f"{weight.removesuffix('weight')}{role}" if weight.endswith(".weight") else f"{weight}_{role}"


def layout_of(spec: str, inputs: str) -> Layout:
    """The layout of a weight under `spec` whose inputs are quantized under `inputs` in each call, perhaps with a static
    scale; "none": inputs stay in high precision."""
    words = inputs.split(":")
    if "given" not in words:
        return _own(spec, {"dynamic": inputs})
    measured = ":".join(word for word in words if word != "given")
    said = {"dynamic": measured, "static": inputs, "input_divides": DIV in words, "has_input_scale": True}
    return _own(spec, said)


def _own(spec: str, said: Mapping[str, Any]) -> Layout:
    true = {key: str(said.get(key)) == "True" for key in ("input_divides", "has_input_scale")}
    inputs = {key: str(said.get(key, "none")) for key in ("dynamic", "static")}
    name = ",".join(f"{key}={value}" for key, value in ({"spec": spec} | inputs | true).items())
    scale = (Part("input_scale", ".input_scale", (F32,), scalar, "input_scale"),) if true["has_input_scale"] else ()
    return Layout(name, spec, scale, **inputs, input_divides=true["input_divides"])
