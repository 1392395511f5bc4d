"""Recipes: which quantization each operand of a Linear gets.

A recipe is an immutable value whose meaning for a Linear is one line of text (`linear_spec()`), the `recipe` argument
of the operators. Names, fields and defaults are those of numerics.md 6.4. Nothing is read from the environment, and
every field does what it says or is refused (numerics.md 0.14).
"""

import difflib

from quire.recipe.base import Format, MMParams, QParams, Recipe
from quire.recipe.block import Float8BlockScaling, MXFP8BlockScaling
from quire.recipe.custom import CustomRecipe
from quire.recipe.nvfp4 import NVFP4BlockScaling
from quire.recipe.per_tensor import DelayedScaling, Float8CurrentScaling

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
    "default",
    "from_name",
    "names",
]

_BY_NAME: dict[str, type[Recipe]] = {
    "nvfp4": NVFP4BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "fp8_current": Float8CurrentScaling,
    "fp8_block": Float8BlockScaling,
    "fp8_delayed": DelayedScaling,
}


def names() -> tuple[str, ...]:
    """The names that from_name takes."""
    return tuple(_BY_NAME)


def from_name(name: str) -> Recipe:
    """The recipe of that name with its defaults. Raises ValueError listing the names."""
    if name not in _BY_NAME:
        near = difflib.get_close_matches(str(name), _BY_NAME, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no recipe {name!r}; the recipes are {', '.join(_BY_NAME)}{hint}")
    return _BY_NAME[name]()


def default(device_type: str = "cpu") -> Recipe:
    """What autocast uses when no recipe is named: MXFP8 on the CPU. Raises NotImplementedError for other devices."""
    if device_type != "cpu":
        raise NotImplementedError(
            f"quire has no default recipe for device {device_type!r} in this version; name a recipe"
        )
    return MXFP8BlockScaling()
