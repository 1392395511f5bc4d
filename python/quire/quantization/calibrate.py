"""Static scales of activations: measured on data, and given to the layers whose recipe wants them."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from quire.autocast import autocast
from quire.checks import check_type, counted
from quire.loading.float_mode import subnormals_kept
from quire.nn.input_scale import amax_of_one, measured, scale_of_amax
from quire.nn.own_context import callers_device, own_context, running
from quire.nn.product_module import ProductModule
from quire.quantization.inputs import (
    Batch,
    Matmul,
    SameInput,
    arguments,
    foreign_experts,
    layers_of,
    listed,
    matmuls,
    uncompiled,
    watched,
)
from quire.recipe import Recipe, as_recipe
from quire.tensor import QuantSpec

# --- what a layer's recipe wants of the largest magnitude that was measured


MISSING = ("raise", "max")


def apply_amaxes(what: str, model: torch.nn.Module, amaxes: Mapping[str, float], missing: str) -> None:
    """CalibrationReport.apply(). amaxes: by the names of calibrate()'s report."""
    names: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ProductModule) and module.recipe is not None and module.recipe.static_input:
            names.setdefault(module, []).append(uncompiled(name))
    if not names:
        raise ValueError(
            f"{what}: no layer of {type(model).__name__} has a recipe with a static scale of x; give it one, such as "
            "quire.convert(model, 'x=fp8_tensor:given,w=fp8_row,dy=mxfp8')"
        )
    specs = {layer: layer.recipe.input_spec for layer in names}
    scales = scales_of(what, names, specs, amaxes, missing)
    if any(buffer(matmul).is_meta for matmul in scales):
        raise ValueError(f"{what}: the model is on the meta device and keeps no values; load its weights first")
    give(scales)


def scales_of(
    what: str,
    names: Mapping[torch.nn.Module, list[str]],
    specs: Mapping[torch.nn.Module, str],
    amaxes: Mapping[str, float],
    missing: str,
) -> dict[Matmul, torch.Tensor]:
    """The static scales [groups] of each matmul of layers. names, specs: of each layer all names in the model, and the
    spec of its inputs. amaxes: by the labels of groups. Raises ValueError if one is missing."""
    check_missing(what, missing)
    found = {matmul: _of_groups(matmul, its, amaxes) for layer, its in names.items() for matmul in matmuls(layer)}
    if absent := _fill(found, missing):
        remedy = ""
        if missing != "max" and any(set(each.values()) - {None} and None in each.values() for each in found.values()):
            remedy = ", or with missing_input_scale='max' use the largest of the other groups of its layer"
        raise ValueError(
            f"{what}: no amax was measured for {', '.join(absent)}; calibrate with batches that reach them, keep these "
            f"layers out of the recipe by filter={remedy}"
        )
    return {
        matmul: torch.cat([scale_of_amax(amax, specs[matmul.layer]) for amax in each.values()])
        for matmul, each in found.items()
    }


def check_missing(what: str, missing: str) -> None:
    """Raises ValueError for an unknown value of missing_input_scale."""
    if missing not in MISSING:
        raise ValueError(f"{what}: missing_input_scale must be one of {', '.join(MISSING)}; got {missing!r}")


@own_context()
def give(scales: Mapping[Matmul, torch.Tensor]) -> None:
    """Writes the scales into layers whose recipe has them."""
    for matmul, scale in scales.items():
        buffer(matmul).copy_(scale)


def buffer(matmul: Matmul) -> torch.Tensor:
    """The static scales of a matmul, [groups], of a layer whose recipe has them."""
    return getattr(matmul.layer, matmul.layer.scale_name(matmul.weight_names()[0]))


def _of_groups(matmul: Matmul, names: list[str], amaxes: Mapping[str, float]) -> dict[str, float | None]:
    """Label of each group -> its amax. The labels begin with the layer's name under which it was measured."""
    each = [{label: amaxes.get(label) for label in matmul.labels(name)} for name in names]
    return next((one for one in each if any(one.values())), each[0])


def _fill(found: Mapping[Matmul, dict[str, float | None]], missing: str) -> list[str]:
    """With "max", gives groups without an amax the largest of their layer. Returns the labels that have none."""
    for each in found.values() if missing == "max" else ():
        there = [amax for amax in each.values() if amax is not None]
        each |= {label: max(there) for label, amax in each.items() if amax is None and there}
    return [label for each in found.values() for label, amax in each.items() if amax is None]


# --- measuring


@dataclass(frozen=True)
class LayerCalibration:
    """The input of one matmul of a layer, or of one of its groups.

    Attributes:
        name: of the layer in the model; with the matmul of a layer that has several, "mlp.fc1"; with the number of the
            group, "experts.fc1[3]".
        amax: the largest magnitude that it was given, the largest of all layers with the same input if they share a
            scale.
        input_scale: the static scale of that amax.
        rows: how many rows of x it saw.
    """

    name: str
    amax: float
    input_scale: float
    rows: int


@dataclass(frozen=True)
class CalibrationReport:
    """What quire.calibrate measured. str() gives a table.

    Attributes:
        spec: the spec of x.
        layers: those that saw rows, in the model's order.
        uncalibrated: names of layers and groups that saw no row, or zeros only, such as experts to which no token was
            sent.
    """

    spec: str
    layers: tuple[LayerCalibration, ...]
    uncalibrated: tuple[str, ...]

    @property
    def input_scales(self) -> dict[str, float]:
        """Name -> static scale."""
        return {layer.name: layer.input_scale for layer in self.layers}

    def apply(self, model: torch.nn.Module, *, missing_input_scale: str = "raise") -> torch.nn.Module:
        """Gives every layer whose own recipe has a static scale of x (the option `given`) the scale that was measured
        for it, in place, and returns the model.

        The scales are buffers, `input_scale`, so they are saved, exported and written by quire.io with the model.

        Args:
            model: the calibrated model, or one with the same names of layers, after its layers got their recipe: by
                quire.convert, quire.quantize_model or `recipe=`. Each layer gets the scale of its own recipe: under
                `fp8_tensor:given` and `nvfp4:global=mul:given` the largest magnitude divided by the largest value,
                under `nvfp4:global=div:given` the inverse of that quotient, under `nvfp4:given` the largest magnitude
                itself (numerics.md 2.5, 5.9).
            missing_input_scale: "raise", or "max": a group for which nothing was measured gets the scale of the group
                of its layer with the largest.

        Returns:
            The model.

        Raises:
            ValueError: if no layer has such a recipe, if nothing was measured for one of them, or if the model is on
                the meta device. Nothing has then changed.
            TypeError: for arguments of a wrong type.
        """
        check_type("CalibrationReport.apply", torch.nn.Module, model=model)
        check_type("CalibrationReport.apply", str, missing_input_scale=missing_input_scale)
        amaxes = {layer.name: layer.amax for layer in self.layers}
        apply_amaxes("CalibrationReport.apply", model, amaxes, missing_input_scale)
        return model

    def __str__(self) -> str:
        width = max(map(len, [layer.name for layer in self.layers] or [""]))
        lines = [f"{counted(len(self.layers), 'input')} under {self.spec}: amax, input_scale, rows"]
        for layer in self.layers:
            lines.append(f"  {layer.name:<{width}}  {layer.amax:<10.4g}  {layer.input_scale:<10.4g}  {layer.rows}")
        if self.uncalibrated:
            lines.append(f"without a scale, since they saw no rows: {', '.join(self.uncalibrated)}")
        return "\n".join(lines)

    __repr__ = __str__


def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    recipe: Recipe | str,
    *,
    shared: bool = True,
) -> CalibrationReport:
    """Runs the model on batches and measures static scales of the inputs of its linear layers. The model does not
    change. report.apply(model) puts the scales into its layers.

    A scale has the meaning that it has in ModelOpt's checkpoints: amax / (6 * 448) for NVFP4 (with the option 256: 6 *
    256), amax / 448 for FP8 (of five exponent bits: 57344), so that code * block scale * input_scale is the value
    (numerics.md 5.9). amax is the largest magnitude over all batches.

    Layers are torch.nn.Linear and those of quire. The input of a LayerNormLinear or LayerNormMLP is that of its
    matmuls, behind the norm and the activation. Each group of a GroupedLinear or expert of a MoE has its own scale.
    Experts of Hugging Face transformers are calibrated after quire.convert(model) has made them layers of quire; until
    then they are among report.uncalibrated, with the layers and groups that saw no rows.
    Each rank of a layer whose weight is sharded (quire.distributed.Parallel) may see a part of x. The amax is the
    largest of all ranks, which must all call calibrate.

    Args:
        model: the model, unquantized. It does not change.
        batches: inputs of the model. A tensor is its one argument, a tuple or list its arguments, a dict its arguments
            by name. The model runs as it is, so calibrate it before it is quantized. If it has layers whose own recipe
            needs static scales, all layers run with decoded weights and unquantized inputs. It runs in eval mode and
            outside of every quire.autocast and torch.autocast, wherever calibrate is called; decorate the forward of a
            model that needs torch.autocast. Its random numbers come from a seed of 0. All of this is afterwards as
            before.
        recipe: a recipe, its name or its text, whose x has a static scale: the families nvfp4 and fp8_tensor.
        shared: matmuls that are given the same tensor (q, k and v; gate and up) get one amax, the largest. They then
            can be joined to one layer. An input that all of them see is the same anyway; amaxes differ only if one of
            the layers was called more often.

    Returns:
        A CalibrationReport.

    Raises:
        ValueError: for a recipe whose x has no static scale, for inputs that are not finite (naming the layer), for no
            batches, or if the model has no linear layers or cannot run because it is on the meta device.
        TypeError: for arguments of a wrong type.
    """
    check_type("calibrate", torch.nn.Module, model=model)
    check_type("calibrate", bool, shared=shared)
    spec = static_spec("calibrate", as_recipe("calibrate", recipe))
    return calibration("calibrate", model, listed("calibrate", batches), spec, shared)


def calibration(
    what: str, model: torch.nn.Module, batches: list[Batch], spec: QuantSpec, shared: bool = True
) -> CalibrationReport:
    """calibrate(). what: the operation, for errors. spec: of x."""
    layers, foreign = layers_of(model), foreign_experts(model)
    if not layers and not foreign:
        raise ValueError(f"{what}: {type(model).__name__} has no linear layers, by itself or within")
    amaxes, same = _Amaxes(what, layers), SameInput()

    def seen(matmul: Matmul, x: object, rows: list[torch.Tensor]) -> None:
        amaxes.see(matmul, rows)
        same.see(matmul, x)

    with running(model):
        with watched(layers, seen), _unquantized(layers), callers_device(), on_meta_refused(what, model):
            for batch in batches:
                args, named = arguments(batch)
                model(*args, **named)
        amaxes.reduce()
        if shared:
            amaxes.share(same)
        return amaxes.report(spec, tuple(foreign.values()))


@contextlib.contextmanager
def on_meta_refused(what: str, model: torch.nn.Module) -> Iterator[None]:
    """Raises ValueError if a model does not run because of a parameter on the meta device. Not before it has failed:
    accelerate gives such parameters their values in the call."""
    try:
        yield
    except RuntimeError as error:
        name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
        if name is None or "meta" not in str(error).lower():
            raise
        raise ValueError(f"{what}: {name} is on the meta device and has no values; load the weights first") from error


def static_spec(what: str, recipe: Recipe | None) -> QuantSpec:
    """The spec of x under the recipe. Raises ValueError if x has no static scale. what: the operation, for errors."""
    if recipe is None:
        raise ValueError(f"{what}: recipe must say the format of x, such as 'nvfp4' or 'fp8_current'; got None")
    if recipe.weight_only:
        raise ValueError(
            f"{what}: x is not quantized under the recipe, and has no scale; pass a recipe of x, such as 'nvfp4'"
        )
    spec = QuantSpec(measured(recipe.input_spec))
    if spec.family not in ("nvfp4", "fp8_tensor") or "row_scaled" in spec.options:
        raise ValueError(
            f"{what}: x under {spec} has scales of its rows or blocks alone, which every call measures; a static "
            "scale is one of a tensor, under nvfp4 or fp8_tensor"
        )
    return spec


def _unquantized(layers: Iterable[torch.nn.Module]) -> contextlib.AbstractContextManager:
    """Layers that wait for a static scale cannot run under their recipe."""
    static = any((own := getattr(layer, "recipe", None)) is not None and own.static_input for layer in layers)
    return autocast(enabled=False) if static else contextlib.nullcontext()


class _Amaxes:
    """Amax and rows of each group of each matmul. names: of layers."""

    def __init__(self, what: str, names: dict[torch.nn.Module, str]) -> None:
        self.what = what
        self.labels = {matmul: matmul.labels(name) for layer, name in names.items() for matmul in matmuls(layer)}
        self.amax = {matmul: [0.0] * len(labels) for matmul, labels in self.labels.items()}
        self.rows = {matmul: [0] * len(labels) for matmul, labels in self.labels.items()}

    @subnormals_kept()
    def see(self, matmul: Matmul, groups: list[torch.Tensor]) -> None:
        for group, x in enumerate(groups):
            if not x.numel():
                continue
            amax = float(x.abs().amax().float())
            if not math.isfinite(amax):
                raise ValueError(
                    f"{self.what}: the input of {self.labels[matmul][group]!r} is not finite, {list(x.shape)} with an "
                    f"amax of {amax}; no scale can be derived from it. Leave out that batch, or run the model in "
                    "float32"
                )
            self.amax[matmul][group] = max(self.amax[matmul][group], amax)
            self.rows[matmul][group] += len(x)

    @subnormals_kept()
    def reduce(self) -> None:
        """Takes the largest over the ranks of a sharded layer: each may see a part of x."""
        for matmul, amaxes in self.amax.items():
            layer, product = matmul
            parallel = layer.of(product, "parallel") if isinstance(layer, ProductModule) else None
            if parallel is not None and parallel.group:
                device = next(layer.parameters()).device
                self.amax[matmul] = parallel.reduced(torch.tensor(amaxes, dtype=torch.float32, device=device)).tolist()

    @subnormals_kept()
    def share(self, same: SameInput) -> None:
        for group in same.groups():
            if len({len(self.amax[matmul]) for matmul in group}) == 1:
                each = [max(amaxes) for amaxes in zip(*(self.amax[matmul] for matmul in group), strict=True)]
                for matmul in group:
                    self.amax[matmul] = list(each)

    @subnormals_kept()
    def report(self, spec: QuantSpec, foreign: tuple[str, ...]) -> CalibrationReport:
        layers, missing, largest = [], [], amax_of_one(spec.text)
        for matmul, labels in self.labels.items():
            for name, amax, rows in zip(labels, self.amax[matmul], self.rows[matmul], strict=True):
                if rows and amax:
                    scale = torch.tensor(amax, dtype=torch.float32, device="cpu") / largest
                    layers.append(LayerCalibration(name, amax, float(scale), rows))
                else:
                    missing.append(name)
        return CalibrationReport(spec.text, tuple(layers), (*missing, *foreign))
