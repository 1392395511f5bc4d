"""transformer_engine.pytorch.quantization: the names of it that are here."""

from quire.nn.weight import quantized_model_init
from quire.te.absent import message
from quire.te.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from quire.te.global_state import FP8GlobalStateManager
from quire.te.moe_padding import get_align_size_for_quantization
from quire.te.names import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from quire.te.quantizer_roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]


def __getattr__(name: str) -> object:
    raise AttributeError(message(name))
