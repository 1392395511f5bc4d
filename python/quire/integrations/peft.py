"""Hugging Face peft: low-rank adapters on layers whose weights are quantized (docs/integrations.md). peft must not
merge an adapter into such a weight."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from quire.integrations import needed
from quire.tensor import QuantizedTensor

#: The version that tests run with.
KNOWN = "0.21.2"


def prepare(config: Any) -> Any:
    """Returns a peft.LoraConfig as it is.

    It checks that merging an adapter into a quantized weight raises NotImplementedError, instead of rounding the sum to
    the weight's format. `import quire` and `import peft` see to that, in either order, so no call of it is needed.
    Layers with plain weights merge as ever.

    Raises ImportError if peft is missing or merges in another way; TypeError for another kind of configuration.
    """
    peft = needed("quire.integrations.peft.prepare", "peft", KNOWN)
    if not isinstance(config, peft.LoraConfig):
        raise TypeError(
            f"quire.integrations.peft.prepare: config must be a peft.LoraConfig, got {type(config).__name__}; only "
            "adapters of this kind are known to work"
        )
    layers = needed("quire.integrations.peft.prepare", "peft.tuners.lora.layer", KNOWN)
    if not is_guarded(layers):
        raise ImportError(
            f"quire.integrations.peft.prepare: peft {peft.__version__} merges in a way that quire does not know; use "
            f"peft {KNOWN}, and do not merge adapters into quantized weights without it"
        )
    return config


def guard(layers: ModuleType) -> None:
    """Makes the methods of peft that merge raise NotImplementedError for a quantized weight, before anything changes.
    layers: the module peft.tuners.lora.layer; `import quire` has this called when it is imported."""
    tuners = importlib.import_module("peft.tuners.tuners_utils")
    layers.Linear.merge = _checked(layers.Linear.merge, _check_layer)  # of one layer, as diffusers calls it

    def check_model(tuner: Any) -> None:
        for module in tuner.model.modules():
            if isinstance(module, tuners.BaseTunerLayer):
                _check_layer(module)

    if hasattr(tuners.BaseTuner, "_check_merge_allowed"):
        tuners.BaseTuner._check_merge_allowed = _checked(tuners.BaseTuner._check_merge_allowed, check_model)


def is_guarded(layers: ModuleType) -> bool:
    """Whether guard() has been called."""
    return getattr(layers.Linear.merge, "_of_quire", False)


def _checked(method: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return method(self, *args, **kwargs)

    checked._of_quire = True
    return checked


def _check_layer(layer: Any) -> None:
    """Raises NotImplementedError if a parameter of the layer below an adapter is quantized."""
    base: torch.nn.Module = layer.get_base_layer()
    for parameter in base.parameters(recurse=False):
        if isinstance(parameter, QuantizedTensor):
            raise NotImplementedError(
                f"quire.integrations.peft: the weight is quantized as {parameter.spec_text}, and a sum with an adapter "
                "would be rounded to it; keep the adapter beside the weight, or call quire.dequantize_weights(model) "
                "(model.dequantize() if from_pretrained has loaded quantized weights) and merge then"
            )
