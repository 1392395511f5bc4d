"""Functions for CustomRecipe(qfactory=...). Each quantizes as the recipe with its name does by default."""

from quire.te.quantizer_roles import DelayedScalingRequest, IdentityQuantizer, QuantizerRole
from quire.te.quantizers import (
    FP8,
    FP8_OF_GRADIENTS,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

__path__: list[str] = []  # TransformerEngine has a package of this name, with this module in it


def _is(role: QuantizerRole | None, tensor_type: str) -> bool:
    return role is not None and role.tensor_type == tensor_type


def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    """Nothing is quantized."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """DelayedScaling."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Float8CurrentScalingQuantizer:
    """Float8CurrentScaling: the formats of Format.HYBRID."""
    return Float8CurrentScalingQuantizer(FP8_OF_GRADIENTS if _is(role, "grad_output") else FP8)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Float8BlockQuantizer:
    """Float8BlockScaling: 128 x 128 values for weights, else 1 x 128."""
    return Float8BlockQuantizer(FP8, block_scaling_dim=2 if _is(role, "weight") else 1)


def mxfp8_factory(role: QuantizerRole | None) -> MXFP8Quantizer:
    """MXFP8BlockScaling."""
    return MXFP8Quantizer(FP8)


def nvfp4_factory(role: QuantizerRole | None) -> NVFP4Quantizer:
    """NVFP4BlockScaling: 16 x 16 values for weights, else the Hadamard transform; gradients round stochastically."""
    if _is(role, "weight"):
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=_is(role, "grad_output"))
