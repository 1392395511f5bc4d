"""Weights for inference: quantized once, rowwise only, in the order that matmuls with few tokens read fastest."""

import dataclasses

import torch

from quire.checks import describe
from quire.conversion.reparametrized import SHARDED, why_not_converted
from quire.conversion.report import Reason
from quire.functional import quantize
from quire.loading.devices import reads_interleaved
from quire.nn.product_module import ProductModule
from quire.recipe import NVFP4BlockScaling, Recipe
from quire.tensor import QuantizedStack, QuantizedTensor, QuantSpec
from quire.tensor.order import reordered, same_codes

_DEQUANTIZE = "Call quire.dequantize_weights(model) first, or convert the original model"


#: What a backward pass through a layer with weights for inference can compute.
GRADIENTS = ("input",)


def check_gradients(what: str, gradients: str | None) -> None:
    """Raises TypeError unless gradients is None or a str, ValueError unless it is one of GRADIENTS."""
    if gradients is not None and not isinstance(gradients, str):
        raise TypeError(f'{what}: gradients must be "input" or None, got {describe(gradients)}')
    if gradients not in (None, *GRADIENTS):
        raise ValueError(
            f"{what}: gradients must be None or 'input', got {gradients!r}; weights for inference are not trained, so "
            "there is no gradient of a weight. To train the weights, convert the model without for_inference"
        )


def inference_recipe(recipe: Recipe, gradients: str | None = None, like_training: bool = False) -> Recipe:
    """The recipe without the parts that only backward needs. NVFP4: no transform, no stochastic rounding, and one scale
    per 1 x 16 values of a weight instead of 16 x 16, which gives smaller errors. gradients="input": backward reads the
    decoded weight, because there are no columnwise codes. like_training: the scales of a weight stay, and so do the
    bits of forward."""
    if gradients is not None and recipe.backward_override is None:
        recipe = dataclasses.replace(recipe, backward_override="dequantized")
    if isinstance(recipe, NVFP4BlockScaling):
        tiles = {} if like_training else {"disable_2d_quantization": True}
        return dataclasses.replace(recipe, disable_rht=True, disable_stochastic_rounding=True, **tiles)
    return recipe


def why_not_quantized(layer: ProductModule, recipe: Recipe, training: bool = False) -> str:
    """The reason why a layer cannot get the recipe: with its own weights for training, with quantized weights for
    inference. "" if it can."""
    if not training and layer.of(layer.products[0], "parallel") is not None:
        return SHARDED
    names = [name for product in layer.products for name in layer.weights(product)]
    return why_not_converted(layer, names, training) or why_other_codes(layer, recipe, training)


def why_other_codes(layer: torch.nn.Module, recipe: Recipe, training: bool) -> str:
    """The reason why codes that a layer already has do not fit the recipe. "" if they fit, and if there are no
    codes."""
    for weight in layer.parameters(recurse=False):
        if isinstance(weight, QuantizedTensor):
            if not same_codes(weight.spec_text, recipe.weight_spec):
                words = f"its weight is quantized already, as {weight.spec_text}, not as {recipe.weight_spec}"
                return Reason(words, _DEQUANTIZE)
            if training and _is_rowwise(weight):
                words = "its weight was quantized for inference, without the codes that backward reads"
                return Reason(words, _DEQUANTIZE)
    return ""


def has_inference_codes(layer: torch.nn.Module) -> bool:
    """Whether a weight of the layer is codes without those that backward reads."""
    return any(isinstance(it, QuantizedTensor) and _is_rowwise(it) for it in layer.parameters(recurse=False))


def _is_rowwise(weight: QuantizedTensor) -> bool:
    return weight.columnwise_data is None


@torch.no_grad()
def quantize_for_inference(layer: ProductModule, recipe: Recipe, made: dict[int, torch.nn.Parameter]) -> None:
    """Gives the layer the recipe, and weights that are quantized parameters without gradients, rowwise and interleaved
    (numerics.md 2.4). made: id of each weight -> its quantized parameter, so that layers with a shared weight still
    share it."""
    layer.recipe = recipe
    layer.add_input_scales()
    for product in layer.products:
        for name, weight in layer.weights(product).items():
            key = id(getattr(layer, name))  # weights() can return a view of it
            if key not in made:
                codes = inference_codes(weight.detach(), recipe.weight_spec)
                made[key] = torch.nn.Parameter(codes, requires_grad=False)
                made[id(made[key])] = made[key]
            setattr(layer, name, made[key])
    for parameter in layer.parameters(recurse=False):
        parameter.requires_grad_(False)
    layer._forget_weights()


def inference_codes(values: torch.Tensor, spec: str) -> QuantizedTensor | QuantizedStack:
    """Values, or codes in any order, as codes under the spec in the order that layers read."""
    if isinstance(values, QuantizedTensor):
        q = values
    elif values.dim() == 3:
        q = QuantizedStack.of([quantize(one, spec, columnwise=False) for one in values.unbind()])
    else:
        q = quantize(values, spec, columnwise=False)
    return q if "swizzled" in QuantSpec(spec).options else reordered(q, reads_interleaved(q.device))
