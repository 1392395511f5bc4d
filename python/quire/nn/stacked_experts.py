"""The experts of a mixture whose module is another library's, with all experts in one tensor for each layer."""

from __future__ import annotations

from typing import TypeGuard

import torch

from quire.distributed.placements import is_dtensor
from quire.moe import permute, unpermute
from quire.nn.layer_base import name_layer
from quire.nn.product import Product, active_call
from quire.nn.product_module import Parameters, ProductModule
from quire.recipe import Recipe
from quire.tensor import DTYPES, QuantizedTensor

#: What transformers' decorator use_experts_implementation says of a module.
_SAID = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")


def is_experts(module: torch.nn.Module) -> TypeGuard[torch.nn.Module]:
    """Whether a module has all experts in one tensor for each layer, as those of Hugging Face transformers have."""
    if isinstance(module, StackedExperts) or not all(hasattr(module, name) for name in _SAID):
        return False
    weights = [module._parameters.get(name) for name in weight_names(module)]
    return all(weight is not None and weight.dim() == 3 for weight in weights)


def weight_names(module: torch.nn.Module) -> tuple[str, str]:
    """Of the first layer of experts and of the second."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def why_not_adopted(module: torch.nn.Module) -> str:
    """Why experts cannot become a StackedExperts; "" if they can."""
    first, second = (module._parameters[name] for name in weight_names(module))
    if getattr(module, "_is_expert_parallel", False) or is_dtensor(first) or is_dtensor(second):
        return "its experts are sharded over ranks"
    if getattr(module, "has_post_expert_norm", False):
        return "it normalizes the result of each expert"
    if "forward" in vars(module):
        return "its forward was replaced, and would not run quire's"
    if first.dtype not in DTYPES:
        return f"its weight is {str(first.dtype).removeprefix('torch.')}, not float32, float16 or bfloat16"
    return ""


class StackedExperts(ProductModule):
    """Experts down(gate(gate_up(x))) of another library's module, which adopt() converts. The active recipe determines
    the quantization (quire.autocast); without one it computes in high precision.

    gate_up_proj (without a gate up_proj) and down_proj: the module's own parameters. Plain ones keep their shape, [E,
    out_features, in_features] or, if is_transposed, [E, in_features, out_features]. Quantized ones are QuantizedStacks
    [E, out_features, in_features]. Biases, if has_bias, are [E, out_features]. Between the layers runs what the module
    ran. recipe: as for quire.Linear.

    Tokens are sorted by expert (quire.moe.permute), and the results of a token's experts are added in float32.
    """

    products = ("up", "down")
    up_parallel = down_parallel = None
    #: The class that the module had.
    source: type[torch.nn.Module]

    @classmethod
    def adopt(cls, module: torch.nn.Module, recipe: Recipe | None) -> StackedExperts:
        """Converts a module for which is_experts() is true in place: the same object, with its parameters, hooks and
        flags. Its random state is uninitialised (reset_states). Raises NotImplementedError, with the reason, if it
        cannot be converted."""
        if reason := why_not_adopted(module):
            raise NotImplementedError(
                f"quire.convert: {type(module).__name__}: {reason}; leave it to transformers, "
                'model.set_experts_implementation("grouped_mm")'
            )
        source = type(module)
        module.__class__ = cls
        module.source, module.recipe, module.groups = source, recipe, module.num_experts
        module.weight_names = weight_names(module)
        module.bias_names = tuple(f"{name}_bias" for name in module.weight_names) if module.has_bias else ()
        module._add_states()
        return module

    def reset_states(self) -> None:
        """New seeds of stochastic rounding."""
        self._reset_sr_states()

    def weights(self, product: str, parameters: Parameters | None = None) -> dict[str, torch.Tensor]:
        """Name -> weight of a layer, [E, out_features, in_features]. parameters: as for ProductModule.weights()."""
        name = self.weight_names[self.products.index(product)]
        return {name: self.as_stored(self.parameter(name) if parameters is None else parameters[name])}

    def as_stored(self, weight: torch.Tensor) -> torch.Tensor:
        """A plain weight [E, out_features, in_features] as the module stores it, and the other way round."""
        swaps = self.is_transposed and not isinstance(weight, QuantizedTensor)
        return weight.transpose(1, 2) if swaps else weight

    def biases(self, product: str, parameters: Parameters | None = None) -> list[torch.Tensor]:
        """One for all experts, or none. parameters: as for weights()."""
        names = self.bias_names and [self.bias_names[self.products.index(product)]]
        return [self.parameter(name) if parameters is None else parameters[name] for name in names]

    def own_groups(self) -> range:
        """The experts that this rank has."""
        return range(self.groups)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, hidden_size], top_k_index [T, k], an integer tensor, top_k_weights [T, k] -> [T,
        hidden_size] in the dtype of hidden_states. A number of num_experts and above is no expert. Raises the errors of
        quire.Linear if dtypes or shapes do not fit."""
        try:
            ids = torch.where(top_k_index < self.groups, top_k_index, -1).to(torch.int32)
            rows, offsets, row_map = permute(hidden_states, ids, self.groups)
            up, down = (Product(self, name, active_call(self, rows)) for name in self.products)
            h = up.run(rows, offsets)
            h = self.source._apply_gate(self, h) if self.has_gate else self.act_fn(h)
            y = down.run(h, offsets)
            for product in (up, down):
                product.commit()
            return unpermute(y, row_map, top_k_weights.float()).to(hidden_states.dtype)
        except Exception as error:
            name_layer(error, self)
            raise

    def extra_repr(self) -> str:
        return f"{self.source.__name__}, num_experts={self.groups}{self._recipe_text()}"
