"""vLLM: the quantization method "quire", a plugin out of vLLM's tree (docs/integrations.md).

Written against vLLM's public interface (QuantizationConfig and LinearMethodBase as of 2026, and the entry points
`vllm.general_plugins`), tested with a stand-in for it, and not run with vLLM.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.integrations import needed
from quire.nn.product_module import checked_recipe
from quire.quantization.model import quantize_model

#: The newest version when this was written.
KNOWN = "0.33.0"
needed("quire.integrations.vllm", "vllm.model_executor.layers.quantization", KNOWN)

from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.layers.quantization import (  # noqa: E402
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig  # noqa: E402

NAME = "quire"
DEFAULT = "mxfp8"


class QuireLinearMethod(LinearMethodBase):
    """Loads a layer's weight in high precision, then quantizes it, and computes as quire.Linear. Under tensor
    parallelism each rank quantizes its part of the weight."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **options: Any) -> None:
        UnquantizedLinearMethod().create_weights(layer, *sizes, **options)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        n, k = layer.weight.shape
        made = torch.nn.Linear(k, n, bias=False, device="meta")
        made.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(torch.Tensor), requires_grad=False)
        layer.quire_linear = quantize_model(made, self.recipe)
        layer.weight = layer.quire_linear.weight

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = layer.quire_linear(x)
        return y if bias is None else y + bias


class QuireConfig(QuantizationConfig):
    """recipe: a recipe's name or text, without static scales. ignore: layers whose name has one of these texts stay in
    high precision; experts and the output layer do in any case."""

    def __init__(self, recipe: str = DEFAULT, ignore: tuple[str, ...] = ()) -> None:
        super().__init__()
        found = checked_recipe("quire.integrations.vllm", recipe)
        if found is None or found.static_input:
            raise ValueError(
                f"quire.integrations.vllm: recipe must be one that measures the scales of x in each call, such as "
                f"{DEFAULT!r}; got {recipe!r}"
            )
        self.recipe, self.ignore = recipe, tuple(ignore)

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # of no GPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuireConfig:
        """config: `quantization_config` of the model: {"quant_method": "quire", "recipe": ..., "ignore": [...]}. Raises
        ValueError for that of a checkpoint which is quantized already."""
        if unknown := config.keys() - {"quant_method", "recipe", "ignore"}:
            raise ValueError(
                "quire.integrations.vllm: quantization_config must have the keys recipe and ignore only, got "
                f"{', '.join(sorted(unknown))} too. Convert a checkpoint that quire has quantized to a dialect that "
                "vLLM reads itself: python -m quire.io convert SRC DST --to compressed-tensors"
            )
        return cls(config.get("recipe", DEFAULT), config.get("ignore") or ())

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> LinearMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        ignored = any(text in prefix for text in self.ignore)
        return UnquantizedLinearMethod() if ignored else QuireLinearMethod(self.recipe)


def register() -> None:
    """Teaches vLLM the quantization method "quire", in this process. vLLM calls it as a plugin in each of its
    processes. A second call does nothing."""
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(QuireConfig)
