"""Recipes: the quantization of each operand of a Linear.

A recipe is an immutable value. One line of text (`linear_spec()`), the `recipe` argument of the operators, defines its
meaning for a Linear. Names, fields and defaults are those of numerics.md 6.4. Nothing is read from the environment.
Every field has an effect, or raises an error (numerics.md 0.14).
"""

import dataclasses
from collections.abc import Mapping

from quire.checks import check_type, describe, near
from quire.loading.devices import HOST
from quire.recipe.base import Format, MMParams, QParams, Recipe
from quire.recipe.block import Float8BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling
from quire.recipe.custom import CustomRecipe, fitting_dy
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


#: What other libraries call ways to quantize weights only.
_OF_WEIGHTS = ("int4", "int8", "w4a16", "w8a16", "nf4")


def names(delayed: bool = True) -> tuple[str, ...]:
    """The names that from_name accepts. delayed=False: without delayed scaling, which no layer can have as its own.

    Args:
        delayed: whether to list delayed scaling, which no layer can have as its own recipe.

    Raises:
        TypeError: unless it is a bool.
    """
    check_type("recipe.names", bool, delayed=delayed)
    return tuple(name for name, recipe in _BY_NAME.items() if delayed or not recipe.delayed())


def from_name(name: str) -> Recipe:
    """The recipe of that name with its defaults.

    Args:
        name: such as "mxfp8" (`names`).

    Raises:
        ValueError: for an unknown name. The error lists the names.
    """
    return _named("recipe.from_name", name)


def _named(what: str, name: str, also: str = "") -> Recipe:
    """what, also: the beginning and the end of an error."""
    if not isinstance(name, str) or name not in _BY_NAME:
        hint = "; did you mean 'fp8_current'?" if name in ("fp8", "FP8") else near(str(name), _BY_NAME)
        listed = ", ".join(_BY_NAME)
        raise ValueError(f"{what}: there is no recipe {describe(name)}; the recipes are {listed}{hint}{also}")
    return _BY_NAME[name]


@dataclasses.dataclass(frozen=True)
class _Specs:
    """The qfactory of a text: equal ones make equal recipes."""

    x: str
    w: str
    dy: str

    def __hash__(self) -> int:  # Dynamo of PyTorch 2.11 asks for it before there are fields
        return hash(_Specs)

    def __call__(self, role: str) -> str:
        return str(getattr(self, role))


def from_text(text: str) -> CustomRecipe:
    """The recipe of a text such as "x=mxfp8,w=mxfp8,dy=mxfp8:e5m2" (docs/specs.md), which can end in
    ",backward=dequantized" or ",backward=high_precision". In "x=none,w=SPEC", which quantizes weights only, dy can be
    left out. Raises ValueError unless it has a spec for each of x, w and dy and nothing else."""
    parts = {role.strip(): spec.strip() for role, _, spec in [part.partition("=") for part in text.split(",")]}
    backward, written = parts.pop("backward", None), text.count(",") + 1
    if parts.get("x") == "none" and "dy" not in parts:
        parts["dy"], written = "none", written + 1
    if sorted(parts) != ["dy", "w", "x"] or written != len(parts) + (backward is not None):
        raise ValueError(
            "a recipe text has a spec for each of x, w and dy, such as 'x=mxfp8,w=mxfp8,dy=mxfp8:e5m2'; got "
            f"{text!r}. {_remedy(text, parts)}"
        )
    return CustomRecipe(_Specs(**parts), backward_override=backward)


def _remedy(text: str, parts: Mapping[str, str]) -> str:
    """What to change in a text that is no recipe."""
    if "dx" in parts:
        return "The format of dx is an argument of a call, fp8_grad="
    missing = [role for role in ("x", "w", "dy") if role not in parts]
    if missing == ["x", "dy"]:
        return f"x and dy are missing. To quantize weights only, write 'x=none,w={parts['w']}'"
    if missing == ["dy"]:
        return f"dy, the gradient of y, is missing. {fitting_dy(parts['x'], parts['w'])}"
    if missing:
        specs = ",".join(f"{name}=SPEC" for name in missing)
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: add {specs}"
    if "kernels" in parts:
        return "Leave out kernels=, which a layer adds within quire.batch_invariant()"
    unknown = [role for role in parts if role not in ("x", "w", "dy")]
    if unknown:
        return f"Leave out {', '.join(map(repr, unknown))}: the names are x, w, dy and backward"
    return "Name each once, with one comma between them"


def as_recipe(what: str, recipe: object, by_layer: bool = False) -> Recipe | None:
    """Converts an argument `recipe`, wherever one is accepted: a recipe is returned unchanged, a name is from_name(), a
    text with "=" is from_text(), None is None. Of an object with a method frozen() it is what this returns now.

    Args:
        what: the operation, for errors.
        recipe: a recipe, its name or its text, or None.
        by_layer: whether the recipe may differ by layer (Recipe.of_layer).

    Raises:
        TypeError: for anything else.
        ValueError: for an unknown name or a wrong text.
        NotImplementedError: for a recipe that differs by layer.
    """
    if not isinstance(recipe, Recipe) and hasattr(recipe, "frozen") and not isinstance(recipe, type):
        recipe = recipe.frozen()
    if recipe is None or isinstance(recipe, Recipe):
        if recipe is not None and recipe.by_layer and not by_layer:
            raise NotImplementedError(
                f"{what}: the recipe differs by layer, which only quire.autocast takes; pass one that is the same for "
                "all layers"
            )
        return recipe
    if isinstance(recipe, str):
        if recipe.lower() in _OF_WEIGHTS:
            raise ValueError(
                f"{what}: there is no recipe {recipe!r}; the recipes are {', '.join(_BY_NAME)}. To quantize weights "
                "only, pass the text 'x=none,w=nvfp4'"
            )
        if "=" not in recipe:
            return _named(what, recipe, " (or pass a text with a spec for each operand, such as 'x=none,w=nvfp4')")
        try:
            return from_text(recipe)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    remedy = "pass an instance, such as MXFP8BlockScaling()"
    if isinstance(recipe, type) and recipe in [type(known) for known in _BY_NAME.values()]:
        remedy = f"construct it: {recipe.__name__}()"
    raise TypeError(
        f"{what}: recipe must be a recipe of quire.recipe, a name ({', '.join(_BY_NAME)}) or a text such as "
        f"'x=mxfp8,w=mxfp8,dy=mxfp8:e5m2'; got {describe(recipe)}; {remedy}"
    )


def default(device_type: str = HOST.type) -> Recipe:
    """The recipe that autocast uses by default: MXFP8 on the CPU.

    Args:
        device_type: a type of torch.device, such as "cpu".

    Raises:
        TypeError: for what is no text.
        NotImplementedError: for other devices.
    """
    check_type("recipe.default", str, device_type=device_type)
    if device_type != HOST.type:
        raise NotImplementedError(
            f"recipe.default: quire has no default recipe for device {device_type!r} in this version; name a recipe"
        )
    return MXFP8BlockScaling()


def __getattr__(name: str) -> object:
    raise AttributeError(f"module 'quire.recipe' has no attribute {name!r}{near(name, __all__)}", name=name)
