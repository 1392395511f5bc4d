"""quantize_model(): a model's weights become codes, rounded to nearest or by a method that has less error."""

import warnings
from collections.abc import Callable, Iterable

import torch

from quire.checks import check_type
from quire.conversion.convert import Plan, Selection, carry_out, select
from quire.conversion.inference import inference_recipe
from quire.functional import quantize
from quire.nn.linear import own_recipe
from quire.quantization.inputs import Batch, called_by_hooks, listed
from quire.quantization.sequential import Gptq, group_weights, keep
from quire.recipe import Recipe, names
from quire.tensor import QuantizedTensor, QuantSpec

METHODS = ("rtn", "4over6", "gptq")


@torch.no_grad()
def quantize_model(
    model: torch.nn.Module,
    recipe: Recipe | str,
    batches: Iterable[Batch] | None = None,
    method: str = "rtn",
    *,
    filter: Callable[[torch.nn.Module, str], bool] | None = None,
    min_features: int = 1,
    damping: float = 0.01,
) -> torch.nn.Module:
    """Quantizes the weights of the model's linear layers for inference, in place, and returns the model.

    The result is that of quire.convert(model, recipe, for_inference=True, tokens=None): the same layers, classes and
    state dict, and quire.conversion_report(model) lists them. The method decides which codes the weights get. Every
    method gives codes of the recipe's format, so files, kernels and exported programs do not depend on it.

    recipe: a recipe, its name or its text; weights are stored under its spec for w, and x is quantized in every call.
    batches: for "gptq", inputs of the model that are like its later inputs: tensors, tuples of arguments or dicts of
        named arguments. Some thousand tokens are sufficient for small models.
    method: "rtn" rounds every weight to nearest, as quire.convert does. "4over6" gives each block of an NVFP4 weight
        the better of two scales by its squared error (numerics.md 5.8). "gptq" minimizes the error of each layer's
        result on the batches (Frantar et al., 2022): columns are rounded one after the other, and later columns make up
        for the error. It reads the inputs that layers get from quantized layers before them, in the codes of x. Scale
        bytes of NVFP4, MXFP4 and MXFP8 are chosen too; other scales are those of the weight.
    filter, min_features: as for quire.convert; here layers of every size are quantized. Pass filter=lambda module,
        name: "lm_head" not in name to keep the output layer. A weight that is tied to an embedding is untied: the
        embedding keeps its values, and the layer gets codes.
    damping: for "gptq", what is added to the diagonal of each Gram matrix, relative to its mean. More keeps the weights
        nearer to their values, which is safer with few batches.

    "gptq" needs the layers' inputs, and hooks see those of torch.nn.Linear, quire.Linear and quire.GroupedLinear. Where
    the model has a list of blocks that call each other's results, such as the layers of a transformer, the blocks are
    quantized one by one, with the memory of one block and of the hidden states of all batches. Otherwise all layers are
    quantized from the same runs of the unquantized model, with a matrix [in_features, in_features] in float64 for
    each. Layers and groups that no row reaches are rounded to nearest, with a warning that names them.

    Raises ValueError if there is nothing to quantize, if the method does not go with the recipe or with a layer, for
    inputs that are not finite, or for an unknown method; TypeError for arguments of a wrong type. The model is then
    unchanged.
    """
    check_type("quantize_model", torch.nn.Module, model=model)
    check_type("quantize_model", str, method=method)
    check_type("quantize_model", float | int, damping=damping)
    plan = _plan(recipe, method, batches, damping)
    try:
        selection = select(model, plan, filter, min_features)
    except ValueError as error:
        raise ValueError(
            str(error).replace("convert: nothing to convert", "quantize_model: nothing to quantize")
        ) from None
    made: dict[int, torch.nn.Parameter] = {}
    _check_values(selection)
    if method == "4over6":
        _four_over_six(selection, made)
    elif method == "gptq":
        made = _gptq(selection, listed("quantize_model", batches), float(damping))
    for note in carry_out(selection, made).notes:
        warnings.warn(f"quire.quantize_model: {note}", stacklevel=3)
    return model


def _plan(recipe: object, method: str, batches: object, damping: float) -> Plan:
    found = own_recipe("quantize_model", recipe)
    if found is None:
        raise ValueError(
            f"quantize_model: recipe must be one of {', '.join(names(delayed=False))}, or a text; got None"
        )
    if method not in METHODS:
        raise ValueError(f"quantize_model: method must be one of {', '.join(METHODS)}; got {method!r}")
    if (batches is None) == (method == "gptq"):
        remedy = "pass inputs of the model" if batches is None else "leave them out, or use method='gptq'"
        raise ValueError(
            f"quantize_model: method={method!r} {'needs' if batches is None else 'reads no'} batches; {remedy}"
        )
    if not damping > 0:
        raise ValueError(f"quantize_model: damping must be above 0, got {damping}; the default is 0.01")
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
        if any(weight.is_meta for weight in group_weights(layer)):
            raise ValueError(
                f"quantize_model: {selection.found[layer][0] or 'the model'} is on the meta device and has no values; "
                "load the weights first"
            )


def _new(selection: Selection) -> list[torch.nn.Module]:
    """The chosen layers whose weights are still in high precision."""
    return [
        layer
        for layer in selection.chosen
        if not any(isinstance(weight, QuantizedTensor) for weight in group_weights(layer))
    ]


def _four_over_six(selection: Selection, made: dict[int, torch.nn.Parameter]) -> None:
    spec = QuantSpec(selection.plan.recipe.weight_spec)
    both = spec.text if any(o.startswith("4over6") for o in spec.options) else f"{spec}:4over6=mse"
    for layer in _new(selection):
        each = []
        for weight in group_weights(layer):
            # A code means the same with and without the option.
            q = quantize(weight.detach(), both, columnwise=False)
            each.append(QuantizedTensor.from_buffers(q.buffers(), spec, q.shape, q.dtype))
        keep(made, layer, each)


def _gptq(selection: Selection, batches: list[Batch], damping: float) -> dict[int, torch.nn.Parameter]:
    model, layers = selection.model, _new(selection)
    for layer in layers:
        if not called_by_hooks(layer):
            raise ValueError(
                f"quantize_model: method='gptq' needs the inputs of each layer, and {selection.found[layer][0]!r}, a "
                f"{type(layer).__name__}, computes them within one operator; leave it out by filter=, or use "
                "method='rtn'"
            )
    work = Gptq(model, {layer: selection.found[layer][0] for layer in layers}, selection.plan, damping)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        work.quantize(batches)
    finally:
        for module in training:
            module.training = True
    if work.unseen:
        warnings.warn(
            f"quire.quantize_model: no row of the batches reached {', '.join(work.unseen)}; these weights are rounded "
            "to nearest",
            stacklevel=4,
        )
    return work.made
