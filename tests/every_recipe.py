"""The recipes under test, in the one table that tests take them from by name: a new one joins by a line."""

import pytest

from quire import recipe as recipes

#: One of each class without state, with its defaults.
DEFAULTS = {
    "fp8_current": recipes.Float8CurrentScaling(),
    "fp8_block": recipes.Float8BlockScaling(),
    "mxfp4": recipes.MXFP4BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
DELAYED = recipes.DelayedScaling(amax_history_len=4)
#: One of each class.
ALL = DEFAULTS | {"delayed": DELAYED}
IN_ANY_PRECISION = {"high_precision": None} | ALL
#: Every option at least once.
VARIANTS = {
    "fp8_current_pow2_e4m3": recipes.Float8CurrentScaling(True, recipes.Format.E4M3),
    "fp8_block_f32_hybrid": recipes.Float8BlockScaling(True, recipes.Format.HYBRID),
    "fp8_block_x2d": recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "fp8_block_dy2d": recipes.Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1),
    "mxfp8_2d_hybrid": recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID, enable_2d_quantization=True),
    "mxfp4_weights_hybrid": recipes.MXFP4BlockScaling(recipes.Format.E4M3, recipes.Format.HYBRID),
    "nvfp4_no_sr": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4_no_2d_no_rht": recipes.NVFP4BlockScaling(disable_2d_quantization=True, disable_rht=True),
    "nvfp4_row_scaled": recipes.NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
    "nvfp4_4over6": recipes.NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE", disable_rht=True),
    "nvfp4_global": recipes.CustomRecipe(
        {"x": "nvfp4:rht:global=div:nan", "w": "nvfp4:16x16:global=mul:nan", "dy": "nvfp4:rht:sr:global=mul:nan"}.get
    ),
    "custom": recipes.CustomRecipe({"x": "fp8_row", "w": "mxfp4", "dy": "mxfp8:e5m2"}.get),
}
#: Recipes whose backward pass does not start from the columnwise codes that forward makes.
OVERRIDDEN = {
    "fp8_current_dequantized": recipes.Float8CurrentScaling(backward_override="dequantized"),
    "fp8_current_high_precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
    "fp8_block_high_precision": recipes.Float8BlockScaling(backward_override="high_precision"),
    "mxfp8_dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "mxfp8_high_precision": recipes.MXFP8BlockScaling(backward_override="high_precision"),
    "nvfp4_dequantized": recipes.NVFP4BlockScaling(backward_override="dequantized"),
    "nvfp4_high_precision": recipes.NVFP4BlockScaling(backward_override="high_precision"),
}
#: Recipes that quantize no x, and so no results as x.
WEIGHT_ONLY = {"weight_only": recipes.CustomRecipe({"x": "none", "w": "nvfp4:nan", "dy": "none"}.get)}
#: Recipes whose x has a scale of the layer, a buffer.
STATIC = {
    "static_fp8": recipes.CustomRecipe({"x": "fp8_tensor:given:nan", "w": "fp8_tensor:nan", "dy": "mxfp8:e5m2"}.get),
    "static_fp8_dequantized": recipes.CustomRecipe(
        {"x": "fp8_tensor:given", "w": "fp8_row", "dy": "fp8_row"}.get, backward_override="dequantized"
    ),
    "static_nvfp4": recipes.CustomRecipe(
        {"x": "nvfp4:global=mul:given", "w": "nvfp4:16x16:nan", "dy": "nvfp4:sr:nan"}.get
    ),
    "static_nvfp4_swizzled": recipes.CustomRecipe({"x": "nvfp4:given:swizzled", "w": "nvfp4", "dy": "nvfp4"}.get),
}
#: Others, for tests that ask for them by name.
FURTHER = {
    "fp8_current_e4m3": recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3),
    "fp8_block_f32": recipes.Float8BlockScaling(use_f32_scales=True),
    "mxfp8_2d": recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4_no_sr_no_rht": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True),
    "nvfp4_4over6_mae_no_sr": recipes.NVFP4BlockScaling(
        nvfp4_4over6="all", disable_rht=True, disable_stochastic_rounding=True
    ),
}
TABLE = IN_ANY_PRECISION | VARIANTS | OVERRIDDEN | WEIGHT_ONLY | FURTHER
#: For operators, which take the specs themselves: families that no class of recipe has.
SPECS_OF_ONE_FAMILY = {
    "fp8_row": "x=fp8_row,w=fp8_row,dy=fp8_row:e5m2",
    "mxfp4": "x=mxfp4,w=mxfp4,dy=mxfp4",
}


def some(*names: str) -> dict:
    """These rows of the table."""
    return {name: TABLE[name] for name in names}


def linear_specs(*names: str) -> dict[str, str]:
    """What the operators take of these recipes."""
    return {name: TABLE[name].linear_spec() for name in names}


def params(table: dict) -> list:
    """The rows for a parameter of a test or of a fixture."""
    return [pytest.param(recipe, id=name) for name, recipe in table.items()]


def each(table: dict) -> pytest.MarkDecorator:
    """A test of one parameter, `recipe`, for each row."""
    return pytest.mark.parametrize("recipe", params(table))


every_recipe = each(ALL)
in_any_precision = each(IN_ANY_PRECISION)
ways = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
