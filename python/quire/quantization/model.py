"""quantize_model(): a model's weights become codes, rounded to nearest or by a method that has less error."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Literal

import torch

from quire.checks import check_type
from quire.conversion.convert import Plan, Selection, carry_out, check_chosen, select
from quire.conversion.inference import check_gradients, inference_recipe
from quire.conversion.report import keep_report
from quire.functional import quantize
from quire.nn.own_context import own_context, running
from quire.nn.product_module import checked_recipe
from quire.nn.stacked_experts import is_experts
from quire.quantization.calibrate import calibration, check_missing, give, on_meta_refused, scales_of, static_spec
from quire.quantization.inputs import Batch, Matmul, listed, matmuls, uncompiled
from quire.quantization.sequential import Gptq, keep
from quire.recipe import Recipe, names
from quire.tensor import QuantizedTensor, QuantSpec

METHODS = ("rtn", "4over6", "gptq")


def quantize_model(
    model: torch.nn.Module,
    recipe: Recipe | str,
    batches: Iterable[Batch] | None = None,
    method: str = "rtn",
    *,
    filter: Callable[[torch.nn.Module, str], bool] | None = None,
    min_features: int = 1,
    damping: float = 0.01,
    missing_input_scale: str = "raise",
    gradients: Literal["input"] | None = None,
) -> torch.nn.Module:
    """Quantizes the weights of the model's linear layers for inference, in place, and returns the model.

    The result is that of quire.convert(model, recipe, for_inference=True, tokens=None): the same layers, classes and
    state dict, and quire.conversion_report(model) lists them. The method decides which codes the weights get. Every
    method gives codes of the recipe's format, so files, kernels and exported programs do not depend on it.

    "gptq" reads the operand of each matmul: in a LayerNormLinear and LayerNormMLP what the norm or the activation
    gives, in a GroupedLinear and MoE the rows of each group. Experts of Hugging Face transformers need
    quire.convert(model) before. If the model has a list of blocks, each of which gets the output of the one before, as
    transformers have, the blocks are quantized one by one, with the memory of one block and of the hidden states of all
    batches. Otherwise all layers are quantized from the same runs of the unquantized model, with a matrix [in_features,
    in_features] in float64 for each. Layers and groups that got no rows are rounded to nearest, with a warning.

    Args:
        model: the model. It changes in place.
        recipe: a recipe, its name or its text; weights are stored under its spec for w, and x is quantized in every
            call. If x has a static scale (the option `given`), it is measured on the batches, as quire.calibrate does.
            To give the layers a scale that was measured before, call quire.convert(model, recipe, for_inference=True,
            tokens=None, min_features=1), and the report's apply(model).
        batches: for "gptq" and static scales, inputs of the model that are like its later inputs: tensors, tuples of
            arguments or dicts of named arguments. Some thousand tokens are sufficient for small models. The model runs
            as in quire.calibrate: in eval mode, and outside of every autocast.
        method: "rtn" rounds every weight to nearest, as quire.convert does. "4over6" gives each block of an NVFP4
            weight the better of two scales by its squared error (numerics.md 5.8). "gptq" minimizes the error of each
            layer's result on the batches (Frantar et al., 2022): columns are rounded one after the other, those with
            the largest inputs first, and later columns make up for the error. It reads the inputs that layers get from
            quantized layers before them, in the codes of x. Scale bytes of NVFP4, MXFP4 and MXFP8 are chosen too; other
            scales are those of the weight.
        filter: as for quire.convert; here layers of every size are quantized. Pass filter=lambda module, name:
            "lm_head" not in name to keep the output layer. A weight that is tied to an embedding is untied: the
            embedding keeps its values, and the layer gets codes.
        min_features: layers with fewer inputs or outputs are left out; 0 or more.
        damping: for "gptq", what is added to the diagonal of each Gram matrix, relative to its mean; finite and above
            0. More keeps the weights nearer to their values, which is safer with few batches.
        missing_input_scale: for static scales: the scale of experts that got no tokens, as for CalibrationReport.apply.
        gradients: as for quire.convert; "input" lets low-rank adapters train on the quantized weights.

    Returns:
        The model.

    Raises:
        ValueError: if there is nothing to quantize, if the method does not go with the recipe or with a layer, if
            "gptq" or a static scale has no batches, for inputs that are not finite, for an unknown method, or for a
            number out of range.
        TypeError: for arguments of a wrong type. The model is then unchanged.
        RuntimeError: if a Gram matrix has no Cholesky factor, because damping is too small for the batches. The model
            is then unchanged.
    """
    check_type("quantize_model", torch.nn.Module, model=model)
    check_type("quantize_model", str, method=method, missing_input_scale=missing_input_scale)
    check_type("quantize_model", float | int, damping=damping)
    check_missing("quantize_model", missing_input_scale)
    check_chosen("quantize_model", filter, min_features)
    plan = _plan(recipe, method, batches, damping)
    check_gradients("quantize_model", gradients)
    plan = dataclasses.replace(plan, recipe=inference_recipe(plan.recipe, gradients))
    selection = _selection(model, plan, filter, min_features)
    seen = [] if batches is None else listed("quantize_model", batches)
    with selection.plain_weights() as computed:
        scales = _scales(selection, seen, missing_input_scale)
        report = carry_out(selection, _codes(selection, method, seen, float(damping), scales), computed)
        give(scales)
    keep_report(model, dataclasses.replace(report, method=method))
    for note in report.notes:
        warnings.warn(f"quire.quantize_model: {note}", stacklevel=2)
    return model


def _selection(model: torch.nn.Module, plan: Plan, filter: Callable | None, min_features: int) -> Selection:
    """Raises ValueError if nothing is chosen, or if a layer has no values."""
    try:
        selection = select(model, plan, filter, min_features)
    except ValueError as error:
        raise ValueError(
            str(error).replace("convert: nothing to convert", "quantize_model: nothing to quantize")
        ) from None
    _check_values(selection)
    return selection


def _codes(
    selection: Selection, method: str, batches: list[Batch], damping: float, scales: dict[Matmul, torch.Tensor]
) -> dict[int, torch.nn.Parameter]:
    """id of each weight -> its quantized parameter; "rtn" leaves them to the conversion."""
    if method == "rtn":
        return {}
    _check_adopted(selection, f"method={method!r}")
    return _four_over_six(selection) if method == "4over6" else _gptq(selection, batches, damping, scales)


def _plan(recipe: object, method: str, batches: object, damping: float) -> Plan:
    found = checked_recipe("quantize_model", recipe)
    if found is None:
        raise ValueError(
            f"quantize_model: recipe must be one of {', '.join(names(delayed=False))}, or a text; got None"
        )
    if method not in METHODS:
        raise ValueError(f"quantize_model: method must be one of {', '.join(METHODS)}; got {method!r}")
    if batches is None and method == "gptq":
        raise ValueError("quantize_model: method='gptq' needs batches; pass inputs of the model")
    if batches is None and found.static_input:
        raise ValueError(
            f"quantize_model: x has a static scale under {found.input_spec}, which is measured on batches, got None; "
            "pass inputs of the model, or leave out the option 'given'. With a scale that was measured before, call "
            "quire.convert(model, recipe, for_inference=True, tokens=None, min_features=1) and report.apply(model)"
        )
    if batches is not None and method != "gptq" and not found.static_input:
        raise ValueError(
            f"quantize_model: method={method!r} reads no batches, and x has no static scale under the recipe; leave "
            "them out, use method='gptq', or give x the option 'given'"
        )
    if isinstance(damping, bool) or not 0 < damping < math.inf:
        raise ValueError(f"quantize_model: damping must be finite and above 0, got {damping}; the default is 0.01")
    plan = Plan(inference_recipe(found), True, None)
    spec = QuantSpec(plan.recipe.weight_spec)
    if method == "4over6" and spec.family != "nvfp4":
        raise ValueError(f"quantize_model: method='4over6' is for NVFP4 weights, and the recipe's are {spec}")
    if method == "gptq" and "swizzled" in spec.options:
        raise ValueError(
            f"quantize_model: method='gptq' does not write swizzled scales; leave the option out of {spec}"
        )
    return plan


def _check_values(selection: Selection) -> None:
    for layer in selection.chosen:
        if any(parameter.is_meta for parameter in layer.parameters(recurse=False)):
            raise ValueError(
                f"quantize_model: {selection.found[layer][0] or 'the model'} is on the meta device and has no values; "
                "load the weights first"
            )


def _new(selection: Selection) -> list[torch.nn.Module]:
    """The chosen layers whose weights are still in high precision."""
    return [
        layer
        for layer in selection.chosen
        if not any(isinstance(parameter, QuantizedTensor) for parameter in layer.parameters(recurse=False))
    ]


def _scales(selection: Selection, batches: list[Batch], missing: str) -> dict[Matmul, torch.Tensor]:
    """The static scales of the inputs of all chosen layers, measured on the unquantized model; none if the recipe has
    none."""
    recipe = selection.plan.recipe
    if not recipe.static_input:
        return {}
    _check_adopted(selection, "a static scale")
    what = "quantize_model"
    report = calibration(what, selection.model, batches, static_spec(what, recipe))
    names = {layer: list(map(uncompiled, selection.found[layer])) for layer in selection.chosen}
    amaxes = {layer.name: layer.amax for layer in report.layers}
    return scales_of(what, names, dict.fromkeys(names, recipe.input_spec), amaxes, missing)


def _check_adopted(selection: Selection, what: str) -> None:
    """Raises ValueError for layers whose matmuls nobody can see."""
    for layer in selection.chosen:
        if is_experts(layer):
            raise ValueError(
                f"quantize_model: {what} is of one matmul, and {selection.found[layer][0]!r}, a {type(layer).__name__} "
                "of another library, does not show its matmuls; call quire.convert(model, min_features=1) first, which "
                "makes it a layer of quire, or leave it out by filter="
            )


@own_context()
def _four_over_six(selection: Selection) -> dict[int, torch.nn.Parameter]:
    made: dict[int, torch.nn.Parameter] = {}
    spec = QuantSpec(selection.plan.recipe.weight_spec)
    both = spec.text if any(o.startswith("4over6") for o in spec.options) else f"{spec}:4over6=mse"
    for layer in _new(selection):
        for one in matmuls(layer):
            each = []
            for weight in one.weights():
                # A code means the same with and without the option.
                q = quantize(weight.detach(), both, columnwise=False)
                each.append(QuantizedTensor.from_buffers(q.buffers(), spec, q.shape, q.dtype))
            keep(made, one, each)
    return made


def _gptq(
    selection: Selection, batches: list[Batch], damping: float, scales: dict[Matmul, torch.Tensor]
) -> dict[int, torch.nn.Parameter]:
    model, layers = selection.model, _new(selection)
    names = {layer: selection.found[layer][0] for layer in layers}
    work = Gptq(model, names, selection.plan, damping, scales)
    with running(model), on_meta_refused("quantize_model", model):
        work.quantize(batches)
    if work.unseen:
        warnings.warn(
            f"quire.quantize_model: no row of the batches reached {', '.join(work.unseen)}; these weights are rounded "
            "to nearest",
            stacklevel=4,
        )
    return work.made
