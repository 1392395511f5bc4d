"""Static scales of activations, measured on data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quire.checks import check_type
from quire.functional import quantize
from quire.nn.grouped_linear import GroupedLinear
from quire.nn.product_module import ProductModule
from quire.quantization.inputs import Batch, SameInput, arguments, called_by_hooks, listed, measured, watched
from quire.recipe import Recipe, as_recipe
from quire.tensor import QuantizedTensor, QuantSpec


@dataclass(frozen=True)
class LayerCalibration:
    """The input of one layer, or of one group of a GroupedLinear.

    name: of the layer in the model, for a group with its number: "experts[3]". amax: the largest magnitude that it was
    fed, the largest of all layers with the same input if they share a scale. input_scale: the static scale of that
    amax. rows: how many rows of x it saw.
    """

    name: str
    amax: float
    input_scale: float
    rows: int


@dataclass(frozen=True)
class CalibrationReport:
    """What quire.calibrate measured. str() gives a table.

    spec: the spec of x. layers: those that saw rows, in the model's order. uncalibrated: names of layers and groups
    that saw none, such as experts to which no token was sent, or whose calls hooks do not see.
    """

    spec: str
    layers: tuple[LayerCalibration, ...]
    uncalibrated: tuple[str, ...]

    @property
    def input_scales(self) -> dict[str, float]:
        """Name -> static scale."""
        return {layer.name: layer.input_scale for layer in self.layers}

    def __str__(self) -> str:
        width = max(map(len, [layer.name for layer in self.layers] or [""]))
        lines = [f"{len(self.layers)} inputs under {self.spec}: amax, input_scale, rows"]
        for layer in self.layers:
            lines.append(f"  {layer.name:<{width}}  {layer.amax:<10.4g}  {layer.input_scale:<10.4g}  {layer.rows}")
        if self.uncalibrated:
            lines.append(f"without a scale, since they saw no rows: {', '.join(self.uncalibrated)}")
        return "\n".join(lines)

    __repr__ = __str__


@torch.no_grad()
def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    recipe: Recipe | str,
    *,
    shared: bool = True,
) -> CalibrationReport:
    """Runs the model on batches and measures static scales of the inputs of its linear layers. The model does not
    change.

    batches: inputs of the model. A tensor is its one argument, a tuple or list its arguments, a dict its arguments by
        name. The model runs as it is, so calibrate it before it is quantized.
    recipe: a recipe, its name or its text, whose x has a static scale: the families nvfp4 and fp8_tensor.
    shared: layers that are fed the same tensor (q, k and v; gate and up) get one amax, the largest. They then can be
        joined to one layer. An input that all of them see is the same anyway; amaxes differ only if one of the layers
        was called more often.

    A scale has the meaning that it has in ModelOpt's checkpoints: amax / (6 * 448) for NVFP4 (with the option 256: 6 *
    256), amax / 448 for FP8 (of five exponent bits: 57344), so that code * block scale * input_scale is the value
    (numerics.md 5.9). amax is the largest magnitude over all batches.

    Layers are torch.nn.Linear, quire.Linear and quire.GroupedLinear, each group of which has its own scale. Other
    layers of quire (LayerNormLinear, LayerNormMLP, the layers of MoE) compute their inputs within one operator, which
    hooks do not see: they are among report.uncalibrated, with the layers and groups that saw no rows. Of a layer whose
    weight is divided over processes (quire.distributed.Parallel), each process may see a part of x. The amax is the
    largest of all processes, which must all call calibrate.

    Raises ValueError for a recipe whose x has no static scale, for inputs that are not finite (naming the layer), for
    no batches, or if the model has no linear layers; TypeError for arguments of a wrong type.
    """
    check_type("calibrate", torch.nn.Module, model=model)
    check_type("calibrate", bool, shared=shared)
    spec = _static_spec(as_recipe("calibrate", recipe))
    found = list(listed("calibrate", batches))
    names = _linear_layers(model)
    visible = [layer for layer in names if called_by_hooks(layer)]
    amaxes = _Amaxes(names)
    same = SameInput()
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with watched(visible, amaxes.see), same.watched(visible):
            for batch in found:
                args, named = arguments(batch)
                model(*args, **named)
    finally:
        for module in training:
            module.training = True
    amaxes.reduce()
    if shared:
        amaxes.share(same)
    return amaxes.report(spec)


def _static_spec(recipe: Recipe | None) -> QuantSpec:
    if recipe is None:
        raise ValueError("calibrate: recipe must say the format of x, such as 'nvfp4' or 'fp8_current'; got None")
    if recipe.weight_only:
        raise ValueError(
            "calibrate: x is not quantized under the recipe, and has no scale; pass a recipe of x, such as 'nvfp4'"
        )
    spec = QuantSpec(measured(recipe.input_spec))
    if spec.family not in ("nvfp4", "fp8_tensor") or "row_scaled" in spec.options:
        raise ValueError(
            f"calibrate: x under {spec} has scales of its rows or blocks alone, which every call measures; a static "
            "scale is one of a tensor, under nvfp4 or fp8_tensor"
        )
    return spec


def amax_of_one(spec: QuantSpec) -> int:
    """The amax that a static scale of 1 stands for: the largest code times the largest block scale."""
    q = quantize(torch.ones(1, 1), spec, columnwise=False)
    if q.rowwise_scale.dtype == torch.float32:
        return round(1 / float(q.rowwise_scale))
    # Under an amax of 1: the value of a code for 1, whose index is 2, in a block with a scale of 1, whose byte is 0x38.
    buffers = q.buffers() | {"rowwise_data": torch.full_like(q.rowwise_data, 2)}
    buffers["rowwise_scale"] = torch.full_like(q.rowwise_scale, 0x38)
    return round(1 / float(QuantizedTensor.from_buffers(buffers, spec, (1, 1)).dequantize()))


def _linear_layers(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Every linear layer, with its first name."""
    found: dict[torch.nn.Module, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | ProductModule):
            found[module] = name
    if not found:
        raise ValueError(f"calibrate: {type(model).__name__} has no linear layers, by itself or within")
    return found


class _Amaxes:
    """Amax and rows of each group of each layer."""

    def __init__(self, names: dict[torch.nn.Module, str]) -> None:
        self.names = names
        groups = {layer: layer.groups if isinstance(layer, GroupedLinear) else 1 for layer in names}
        self.amax = {layer: [0.0] * count for layer, count in groups.items()}
        self.rows = {layer: [0] * count for layer, count in groups.items()}

    def see(self, layer: torch.nn.Module, groups: list[torch.Tensor]) -> None:
        for group, x in enumerate(groups):
            if not x.numel():
                continue
            amax = float(x.abs().amax().float())
            if not math.isfinite(amax):
                raise ValueError(
                    f"calibrate: the input of {self._name(layer, group)!r} is not finite, {list(x.shape)} with an amax "
                    f"of {amax}; no scale can be derived from it. Leave out that batch, or run the model in float32"
                )
            self.amax[layer][group] = max(self.amax[layer][group], amax)
            self.rows[layer][group] += len(x)

    def reduce(self) -> None:
        """Takes the largest over the processes among which a layer is divided: each may see a part of x."""
        for layer, amaxes in self.amax.items():
            parallel = getattr(layer, "parallel", None)
            if parallel is not None and parallel.group:
                device = next(layer.parameters()).device
                self.amax[layer] = parallel.reduced(torch.tensor(amaxes, device=device)).tolist()

    def share(self, same: SameInput) -> None:
        for layers in same.groups():
            if len({len(self.amax[layer]) for layer in layers}) == 1:
                each = [max(amaxes) for amaxes in zip(*(self.amax[layer] for layer in layers), strict=True)]
                for layer in layers:
                    self.amax[layer] = list(each)

    def report(self, spec: QuantSpec) -> CalibrationReport:
        layers, missing, largest = [], [], amax_of_one(spec)
        for layer in self.names:
            for group, (amax, rows) in enumerate(zip(self.amax[layer], self.rows[layer], strict=True)):
                name = self._name(layer, group)
                if rows and amax:
                    layers.append(LayerCalibration(name, amax, float(torch.tensor(amax) / largest), rows))
                else:
                    missing.append(name)
        return CalibrationReport(spec.text, tuple(layers), tuple(missing))

    def _name(self, layer: torch.nn.Module, group: int) -> str:
        return f"{self.names[layer]}[{group}]" if isinstance(layer, GroupedLinear) else self.names[layer]
