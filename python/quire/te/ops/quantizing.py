"""Quantization as an operation."""

from typing import Any

import torch

from quire.autocast import active_recipe
from quire.functional import quantize
from quire.recipe import Recipe
from quire.te.ops.operation import Input, Operation, plain
from quire.tensor import QuantizedActivation, QuantizedTensor


class _RoundedGradient(torch.autograd.Function):
    """The identity, whose gradient is rounded under a spec."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spec: str) -> torch.Tensor:
        ctx.spec = spec
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return quantize(gradient, ctx.spec).dequantize(gradient.dtype), None


class Quantize(Operation, torch.nn.Module):
    """Quantizes as the active recipe quantizes inputs of layers; without one it returns x.

    forward: whether the result is quantized: a QuantizedActivation if there will be a backward pass, else a
        QuantizedTensor. te.ops.Linear takes its codes, all other operations its values.
    backward: whether the gradient is rounded to the recipe's format of gradients, along rows, to nearest and without a
        transform, as by fp8_grad of te.Linear; not under a recipe with a backward_override.

    Raises NotImplementedError under delayed scaling and recipes with static scales, whose scales are states of layers,
    and under recipes that differ by layer.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantize_forward, self.quantize_backward = forward, backward

    def forward(self, x: Input) -> Input:
        recipe = active_recipe()
        if recipe is None:
            return x
        _check(recipe)
        if recipe.weight_only:
            return x
        if self.quantize_backward and recipe.backward_override is None:
            gradient = recipe.linear_spec(fp8_grad=True).rpartition(",dx=")[2]
            x = _RoundedGradient.apply(plain(x), gradient)
        if not self.quantize_forward or isinstance(x, QuantizedActivation | QuantizedTensor):
            return x
        return quantize(x, recipe.input_spec, columnwise=torch.is_grad_enabled())


def _check(recipe: Recipe) -> None:
    if recipe.delayed() or recipe.static_input or recipe.by_layer:
        raise NotImplementedError(
            f"te.ops.Quantize: {type(recipe).__name__} has scales or specs of single layers, and this operation is "
            "none. Remove it, since layers quantize their inputs themselves, or use Float8CurrentScaling"
        )
