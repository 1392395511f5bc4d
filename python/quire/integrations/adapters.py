"""What keeps peft from merging an adapter into a quantized weight."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from quire.tensor import QuantizedTensor


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
