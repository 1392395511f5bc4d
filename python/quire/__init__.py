"""Linear layers whose products run in FP8, MXFP8 or NVFP4, forward and backward, captured whole by torch.compile."""

import json

from quire import _library, _transforms

_library.load()
_transforms.register()

from quire import debug, delayed, moe, recipe, runners  # noqa: E402  (the operators must be there first)
from quire.autocast import active_recipe, autocast  # noqa: E402
from quire.checkpoint import checkpoint  # noqa: E402
from quire.convert import ConversionReport, LayerReport, ParameterReport, conversion_report, convert  # noqa: E402
from quire.delayed import delayed_state, set_delayed_state  # noqa: E402
from quire.drop_in import (  # noqa: E402
    DType,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from quire.explain import explain  # noqa: E402
from quire.functional import amax, dequantize, nvfp4_linear, nvfp4_moe, nvfp4_moe_routed, quantize  # noqa: E402
from quire.moe.te_padding import Fp8Padding, Fp8Unpadding  # noqa: E402
from quire.moe.te_permutation import (  # noqa: E402
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from quire.moe.te_router import (  # noqa: E402
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from quire.nn.cache import quantize_weights  # noqa: E402
from quire.nn.grouped_linear import GroupedLinear  # noqa: E402
from quire.nn.layernorm_linear import LayerNormLinear  # noqa: E402
from quire.nn.layernorm_mlp import LayerNormMLP  # noqa: E402
from quire.nn.linear import Linear  # noqa: E402
from quire.nn.moe import MoE  # noqa: E402
from quire.nn.norm import LayerNorm, RMSNorm  # noqa: E402
from quire.nn.optimizer_state import reorder_optimizer_state  # noqa: E402
from quire.nn.prepack import prepack_weights, unpack_weights  # noqa: E402
from quire.nn.weight import quantized_model_init  # noqa: E402
from quire.quantizer import (  # noqa: E402
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from quire.random import rng_state, set_rng_state  # noqa: E402
from quire.tensor import (  # noqa: E402
    Float8BlockwiseQTensor,
    Float8Tensor,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedActivation,
    QuantizedStack,
    QuantizedTensor,
    QuantSpec,
    TensorProto,
)

__version__: str = json.loads((_library.FOLDER / "build.json").read_text())["quire"]

__all__ = [
    "ConversionReport",
    "DType",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LayerReport",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MoE",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "ParameterReport",
    "QuantSpec",
    "QuantizedActivation",
    "QuantizedStack",
    "QuantizedTensor",
    "Quantizer",
    "RMSNorm",
    "RoutingMapFormat",
    "TensorProto",
    "active_recipe",
    "amax",
    "autocast",
    "checkpoint",
    "conversion_report",
    "convert",
    "debug",
    "delayed",
    "delayed_state",
    "dequantize",
    "explain",
    "fp8_autocast",
    "fp8_model_init",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "moe",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "nvfp4_linear",
    "nvfp4_moe",
    "nvfp4_moe_routed",
    "prepack_weights",
    "quantize",
    "quantize_weights",
    "quantized_model_init",
    "recipe",
    "reorder_optimizer_state",
    "rng_state",
    "runners",
    "set_delayed_state",
    "set_rng_state",
    "unpack_weights",
]


def __getattr__(name: str) -> object:
    from quire.unavailable import message

    raise AttributeError(message(name))
