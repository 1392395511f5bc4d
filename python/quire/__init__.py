"""Linear and Mixture-of-Experts layers whose matmuls have operands in FP8, MXFP8, MXFP4 or NVFP4, in the forward and
the backward pass, captured whole by torch.compile."""

import importlib
from typing import TYPE_CHECKING

from quire.loading import library, transforms
from quire.loading.deferred import when_imported

library.load()
transforms.register()
transforms.register_flops()

from quire import debug, delayed, distributed, moe, recipe, runners  # noqa: E402  (the operators must be there first)
from quire.autocast import (  # noqa: E402
    active_recipe,
    autocast,
    batch_invariant,
    is_batch_invariant_enabled,
    set_batch_invariant,
)
from quire.checks import near  # noqa: E402
from quire.conversion.convert import convert  # noqa: E402
from quire.conversion.recommend import RecipeEstimate, Recommendation, recommend  # noqa: E402
from quire.conversion.refit import OPENERS, RefitReport, refit  # noqa: E402
from quire.conversion.report import ConversionReport, LayerReport, ParameterReport, conversion_report  # noqa: E402
from quire.delayed import delayed_state, set_delayed_state  # noqa: E402
from quire.explain import explain  # noqa: E402
from quire.functional import (  # noqa: E402
    amax,
    dequantize,
    quantize,
    synchronize,
)
from quire.nn.cache import quantize_weights  # noqa: E402
from quire.nn.grouped_linear import GroupedLinear  # noqa: E402
from quire.nn.layernorm_linear import LayerNormLinear  # noqa: E402
from quire.nn.layernorm_mlp import LayerNormMLP  # noqa: E402
from quire.nn.linear import Linear  # noqa: E402
from quire.nn.moe import MoE  # noqa: E402
from quire.nn.norm import LayerNorm, RMSNorm  # noqa: E402
from quire.nn.quantized_parameters import dequantize_weights, prepack_weights, unpack_weights  # noqa: E402
from quire.nn.random_state import rng_state, set_rng_state  # noqa: E402
from quire.nn.recompute import checkpoint  # noqa: E402
from quire.nn.training_state import TrainingState  # noqa: E402
from quire.nn.weight import quantized_model_init  # noqa: E402
from quire.runners import nvfp4_linear, nvfp4_moe, nvfp4_moe_routed  # noqa: E402
from quire.tensor import (  # noqa: E402
    QuantizedActivation,
    QuantizedStack,
    QuantizedTensor,
    QuantSpec,
    TensorProto,
)

if TYPE_CHECKING:
    from quire.quantization.calibrate import CalibrationReport, LayerCalibration, calibrate
    from quire.quantization.model import quantize_model

__version__: str = library.built()["quire"]

__all__ = [
    "CalibrationReport",
    "ConversionReport",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LayerCalibration",
    "LayerReport",
    "Linear",
    "MoE",
    "ParameterReport",
    "QuantSpec",
    "QuantizedActivation",
    "QuantizedStack",
    "QuantizedTensor",
    "RMSNorm",
    "RecipeEstimate",
    "Recommendation",
    "RefitReport",
    "TensorProto",
    "TrainingState",
    "active_recipe",
    "amax",
    "autocast",
    "batch_invariant",
    "calibrate",
    "checkpoint",
    "conversion_report",
    "convert",
    "debug",
    "delayed",
    "delayed_state",
    "dequantize",
    "dequantize_weights",
    "distributed",
    "explain",
    "is_batch_invariant_enabled",
    "moe",
    "nvfp4_linear",
    "nvfp4_moe",
    "nvfp4_moe_routed",
    "prepack_weights",
    "quantize",
    "quantize_model",
    "quantize_weights",
    "quantized_model_init",
    "recipe",
    "recommend",
    "refit",
    "rng_state",
    "runners",
    "set_batch_invariant",
    "set_delayed_state",
    "set_rng_state",
    "synchronize",
    "unpack_weights",
]

when_imported("peft.tuners.lora.layer", lambda layers: importlib.import_module("quire.integrations.peft").guard(layers))
when_imported(
    "torch.distributed.pipelining.stage", lambda stages: importlib.import_module("quire.nn.dry_runs").guard(stages)
)
OPENERS.append(lambda model, path: importlib.import_module("quire.io.into_model").fitted(model, path))

#: Modules that are public beside these names.
_MODULES = ("functional", "info", "io", "nn", "te")
#: What is imported when it is first used: `python -m quire.info` runs its module, and few programs need the others.
_LATER = ("info", "integrations", "io", "quantization", "te")
_LATER_NAMES = {
    "CalibrationReport": "quire.quantization.calibrate",
    "LayerCalibration": "quire.quantization.calibrate",
    "calibrate": "quire.quantization.calibrate",
    "quantize_model": "quire.quantization.model",
}


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})


def __getattr__(name: str) -> object:
    if name in _LATER:
        return importlib.import_module(f"quire.{name}")
    if name in _LATER_NAMES:
        value = getattr(importlib.import_module(_LATER_NAMES[name]), name)
        globals()[name] = value  # the next time it is found without this function
        return value
    raise AttributeError(f"module 'quire' has no attribute {name!r}{near(name, __dir__())}", name=name)
