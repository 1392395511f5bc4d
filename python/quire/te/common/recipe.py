"""transformer_engine.common.recipe: recipes with the same names, fields and defaults, whose fields can be set.

quire.recipe has immutable recipes of the same names. quire takes both, everywhere.
"""

import torch

import quire.recipe
from quire.loading.for_dynamo import assume_constant_result
from quire.recipe import Format, MMParams, QParams
from quire.te.common.settable import Params, Recipe, settable
from quire.te.quantizer_roles import check_factory, recipe_of_factory


@settable(quire.recipe.DelayedScaling)
class DelayedScaling(Recipe):
    """quire.recipe.DelayedScaling, whose fields can be set."""


class _PowersOfTwo(Recipe):
    """Recipes with a field that says of x, w and dy alike whether scales are powers of two."""

    #: The name of the field, and its value where they are.
    _power_2 = "", True

    def _default_params(self) -> Params:
        name, value = self._power_2
        return (QParams(power_2_scale=getattr(self, name) == value),) * 3

    def _fields_of(self, params: Params) -> dict[str, bool] | None:
        name, value = self._power_2
        power_2 = params[0].power_2_scale
        return {name: power_2 == value} if params == (QParams(power_2_scale=power_2),) * 3 else None


FP8_PARAMS = "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"


@settable(quire.recipe.Float8CurrentScaling, *FP8_PARAMS)
class Float8CurrentScaling(_PowersOfTwo):
    """quire.recipe.Float8CurrentScaling, whose fields can be set. fp8_quant_fwd_inp, fp8_quant_fwd_weight and
    fp8_quant_bwd_grad can be set too: power_2_scale and amax_epsilon of x, w and dy."""

    _power_2 = "use_power_2_scales", True


@settable(quire.recipe.MXFP8BlockScaling)
class MXFP8BlockScaling(Recipe):
    """quire.recipe.MXFP8BlockScaling, whose fields can be set."""


@settable(quire.recipe.Float8BlockScaling, *FP8_PARAMS)
class Float8BlockScaling(_PowersOfTwo):
    """quire.recipe.Float8BlockScaling, whose fields can be set. fp8_quant_fwd_inp, fp8_quant_fwd_weight and
    fp8_quant_bwd_grad can be set too: power_2_scale and amax_epsilon of x, w and dy."""

    _power_2 = "use_f32_scales", False


@settable(
    quire.recipe.NVFP4BlockScaling,
    *("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad"),
)
class NVFP4BlockScaling(Recipe):
    """quire.recipe.NVFP4BlockScaling, whose fields can be set. fp4_quant_fwd_inp, fp4_quant_fwd_weight and
    fp4_quant_bwd_grad can be set too: random_hadamard_transform, stochastic_rounding and fp4_2d_quantization of x, w
    and dy. They take precedence over disable_rht, disable_stochastic_rounding and disable_2d_quantization."""

    def _default_params(self) -> Params:
        transform = not self.disable_rht
        return (
            QParams(random_hadamard_transform=transform),
            QParams(fp4_2d_quantization=not self.disable_2d_quantization),
            QParams(random_hadamard_transform=transform, stochastic_rounding=not self.disable_stochastic_rounding),
        )

    def _fields_of(self, params: Params) -> dict[str, bool] | None:
        transform, tiles = params[0].random_hadamard_transform, params[1].fp4_2d_quantization
        stochastic = params[2].stochastic_rounding
        same = (
            QParams(random_hadamard_transform=transform),
            QParams(fp4_2d_quantization=tiles),
            QParams(random_hadamard_transform=transform, stochastic_rounding=stochastic),
        )
        if params != same:
            return None
        return {
            "disable_rht": not transform,
            "disable_stochastic_rounding": not stochastic,
            "disable_2d_quantization": not tiles,
        }

    def _any_params(self) -> dict[str, bool]:
        return {"disable_rht": True}


@settable(quire.recipe.CustomRecipe)
class CustomRecipe(Recipe):
    """Quantizers by role. qfactory is called with a QuantizerRole for each input, weight and gradient of a result that
    a matmul quantizes. It returns a quantizer, a spec of quire or its text, a DelayedScalingRequest, or None (or an
    IdentityQuantizer) for high precision.

    A qfactory that reads the name of the role is called once for each layer under whose recipe it runs, and can return
    other quantizers for each. It must return the same ones whenever it is called with the same role. It is called when
    the fields are read, and not by the constructor.
    quantization_alignment: what get_align_size_for_quantization() returns. The other fields are those of
    quire.recipe.CustomRecipe. Reading raises NotImplementedError for combinations that no matmul of quire has.
    """

    def __post_init__(self) -> None:
        check_factory(self.qfactory)
        self._check_alignment()

    def frozen(self) -> quire.recipe.Recipe:
        if torch.compiler.is_dynamo_compiling():
            _ask_while_tracing(self)  # before what follows looks for answers
        return super().frozen()

    def _check_alignment(self) -> None:
        alignment = self.quantization_alignment
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            raise ValueError(
                f"CustomRecipe: quantization_alignment must be positive, an int of at least 1; got {alignment!r}"
            )

    def _recipe(self, fields: dict[str, object]) -> quire.recipe.Recipe:
        self._check_alignment()
        del fields["quantization_alignment"]
        return recipe_of_factory(**fields)


# Factories are functions of the user's, which need not be traceable.
@assume_constant_result
def _ask_while_tracing(recipe: CustomRecipe) -> int:
    recipe.frozen()
    return 0


__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]
