"""Recipes: which quantization each operand of a Linear gets.

A recipe is an immutable value whose meaning for a Linear is one line of text (`linear_spec()`), the `recipe` argument
of the operators. Names, fields and defaults are those of numerics.md 6.4. Nothing is read from the environment, and
every field does what it says or is refused (numerics.md 0.14).
"""

import dataclasses

from quire.checks import near
from quire.recipe.base import Format, MMParams, QParams, Recipe
from quire.recipe.block import Float8BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling
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
    "MXFP4BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "as_recipe",
    "default",
    "from_name",
    "names",
]

# Made once: recipes are immutable, and a name may be given at every step.
_BY_NAME: dict[str, Recipe] = {
    "nvfp4": NVFP4BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "fp8_current": Float8CurrentScaling(),
    "fp8_block": Float8BlockScaling(),
    "fp8_delayed": DelayedScaling(),
}


def names() -> tuple[str, ...]:
    """The names that from_name takes."""
    return tuple(_BY_NAME)


def from_name(name: str) -> Recipe:
    """The recipe of that name with its defaults. Raises ValueError listing the names."""
    if name not in _BY_NAME:
        raise ValueError(
            f"there is no recipe {name!r}; the recipes are {', '.join(_BY_NAME)}{near(str(name), _BY_NAME)}"
        )
    return _BY_NAME[name]


@dataclasses.dataclass(frozen=True)
class _Specs:
    """The qfactory of a text: equal ones make equal recipes."""

    x: str
    w: str
    dy: str

    def __call__(self, role: str) -> str:
        return str(getattr(self, role))


def from_text(text: str) -> CustomRecipe:
    """The recipe of a text such as "x=mxfp8,w=mxfp8,dy=mxfp8:e5m2" (docs/specs.md), which may end in
    ",backward=dequantized" or ",backward=high_precision". Raises ValueError unless it has a spec for each of x, w and
    dy and nothing else."""
    parts = {role: spec for role, _, spec in [part.partition("=") for part in text.split(",")]}
    backward = parts.pop("backward", None)
    if sorted(parts) != ["dy", "w", "x"] or text.count(",") != len(parts) - (backward is None):
        raise ValueError(
            "a recipe text has a spec for each of x, w and dy, such as 'x=mxfp8,w=mxfp8,dy=mxfp8:e5m2'; got "
            f"{text!r}. The format of dx is an argument of a call, fp8_grad="
        )
    return CustomRecipe(_Specs(**parts), backward_override=backward)


def as_recipe(what: str, recipe: object) -> Recipe | None:
    """What an argument `recipe` means, wherever one is taken: a recipe is itself, a name is from_name(), a text with
    "=" is from_text(), None is None.

    what: the operation, for errors. Raises TypeError for anything else, ValueError for a name or a text that is none.
    """
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        try:
            return from_text(recipe) if "=" in recipe else from_name(recipe)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    remedy = "pass an instance, such as MXFP8BlockScaling()"
    if isinstance(recipe, type) and recipe in [type(known) for known in _BY_NAME.values()]:
        remedy = f"construct it: {recipe.__name__}()"
    raise TypeError(
        f"{what}: recipe must be a recipe of quire.recipe, a name ({', '.join(_BY_NAME)}) or a text such as "
        f"'x=mxfp8,w=mxfp8,dy=mxfp8:e5m2'; got {recipe!r}; {remedy}"
    )


def default(device_type: str = "cpu") -> Recipe:
    """What autocast uses when no recipe is named: MXFP8 on the CPU. Raises NotImplementedError for other devices."""
    if device_type != "cpu":
        raise NotImplementedError(
            f"quire has no default recipe for device {device_type!r} in this version; name a recipe"
        )
    return MXFP8BlockScaling()


def __getattr__(name: str) -> object:
    raise AttributeError(f"module 'quire.recipe' has no attribute {name!r}{near(name, __all__)}", name=name)
