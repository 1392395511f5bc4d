"""Hugging Face peft: low-rank adapters on layers whose weights are quantized (docs/integrations.md). peft must not
merge an adapter into such a weight, and must not initialise an adapter by a change of it."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from quire.integrations import needed
from quire.tensor import QuantizedTensor

#: The version that tests run with.
KNOWN = "0.21.2"

#: How the values of init_lora_weights begin with which peft writes a remainder, W - BA, into the weight. With "lora_ga"
#: it does that only in layers for which peft.tuners.lora.preprocess_loraga has kept a gradient.
_WRITES = ("pissa", "corda", "olora", "loftq", "lora_ga")


def prepare(config: Any) -> Any:
    """Returns a peft.LoraConfig as it is.

    It checks that merging an adapter into a quantized weight raises NotImplementedError, instead of rounding the sum to
    the weight's format. So does an initialisation of adapters that writes to a quantized weight, such as "pissa".
    `import quire` and `import peft` see to that, in either order, so no call of it is needed. Layers with plain weights
    merge as ever.

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
    """Makes the methods of peft that write to weights raise NotImplementedError for a quantized weight, before anything
    changes. layers: the module peft.tuners.lora.layer; `import quire` has this called when it is imported."""
    tuners = importlib.import_module("peft.tuners.tuners_utils")
    layers.Linear.merge = _checked(layers.Linear.merge, _check_layer)  # of one layer, as diffusers calls it

    def check_model(tuner: Any) -> None:
        for module in tuner.model.modules():
            if isinstance(module, tuners.BaseTunerLayer):
                _check_layer(module)

    if hasattr(tuners.BaseTuner, "_check_merge_allowed"):
        tuners.BaseTuner._check_merge_allowed = _checked(tuners.BaseTuner._check_merge_allowed, check_model)
    tuners.BaseTuner.inject_adapter = _checked(tuners.BaseTuner.inject_adapter, _check_initialisation)


def is_guarded(layers: ModuleType) -> bool:
    """Whether guard() has been called."""
    return getattr(layers.Linear.merge, "_of_quire", False)


def _checked(method: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """The method, after a check of its object and, if the check takes them, of its arguments."""
    takes = inspect.signature(method)
    names = list(inspect.signature(check).parameters)[1:]

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = takes.bind(self, *args, **kwargs).arguments if names else {}
        check(self, *[given.get(name) for name in names])
        return method(self, *args, **kwargs)

    checked._of_quire = True
    return checked


def _check_layer(layer: Any) -> None:
    """Raises NotImplementedError if a parameter of the layer below an adapter is quantized."""
    if (spec := _quantized_as(layer)) is not None:
        raise NotImplementedError(
            f"quire.integrations.peft: the weight is quantized as {spec}, and a sum with an adapter would be rounded "
            "to it; keep the adapter beside the weight, or call quire.dequantize_weights(model) (model.dequantize() if "
            "from_pretrained has loaded quantized weights) and merge then"
        )


def _check_initialisation(
    tuner: Any, model: torch.nn.Module, adapter_name: str, state_dict: Mapping[str, torch.Tensor] | None
) -> None:
    """Raises NotImplementedError if the adapter's configuration has peft write to a weight that is quantized."""
    config = tuner.peft_config[adapter_name]
    way = _way_that_writes(config)
    if way is None:
        return
    for name, layer in _adapted(tuner, model, config, state_dict):
        spec = _quantized_as(layer)
        if spec is not None and ("lora_ga" not in way or hasattr(_base(layer), "_peft_loraga_grad")):
            raise NotImplementedError(
                f"quire.integrations.peft: {way} initialises an adapter by a change of the weight, and that of "
                f"{name!r} is quantized as {spec}, to which the changed weight would be rounded; use the default "
                "initialisation, or call peft.get_peft_model with the unquantized model and quire.convert after it"
            )


def _way_that_writes(config: Any) -> str | None:
    """The argument of a peft.LoraConfig that makes peft write to weights when it adds the adapter, or None."""
    if getattr(config, "kasa_config", None) is not None:
        return "kasa_config"
    init = getattr(config, "init_lora_weights", None)
    writes = isinstance(init, str) and init.lower().startswith(_WRITES)
    return f"init_lora_weights={init!r}" if writes else None


def _adapted(
    tuner: Any, model: torch.nn.Module, config: Any, state_dict: Mapping[str, torch.Tensor] | None
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers that get an adapter, and their names. state_dict: its keys choose them, as in peft's
    inject_adapter."""
    tuners = importlib.import_module("peft.tuners.tuners_utils")
    config = tuner._prepare_adapter_config(copy.deepcopy(config), tuner.get_model_config(model))
    config = tuners._maybe_include_all_linear_layers(config, model)
    own = None if state_dict is None else {key.rsplit(f".{tuner.prefix}", 1)[0] for key in state_dict}
    for name, layer in model.named_modules():
        if name and (tuner._check_target_module_exists(config, name) if own is None else name in own):
            yield name, layer


def _base(layer: Any) -> torch.nn.Module:
    """The layer below the adapters, if there are some."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def _quantized_as(layer: Any) -> str | None:
    """The spec of a quantized parameter of the layer below an adapter; None if none is quantized."""
    own = _base(layer).parameters(recurse=False)
    return next((each.spec_text for each in own if isinstance(each, QuantizedTensor)), None)
