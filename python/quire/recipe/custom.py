"""Any spec for any operand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.checks import describe
from quire.recipe.base import Format, Recipe, check_shared_fields, recipe_class
from quire.recipe.linear_spec import LinearSpec
from quire.tensor import QuantSpec
from quire.tensor.spec import as_spec, check_recipe


def fitting_dy(x: str, w: str) -> str:
    """A sentence for errors: a spec of dy that fits these specs of x and w."""
    dy = x.split(":")[0]
    try:
        check_recipe("", f"x={x},w={w},dy={dy}")
    except ValueError:
        return "Give it a spec that fits x and w (docs/specs.md)"
    return f"With the format of x, it is dy={dy}"


@recipe_class
@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Any spec for any operand. At construction qfactory is called once for each of "x", "w" and "dy". It returns a
    QuantSpec or its text (docs/specs.md).

        recipe = CustomRecipe({"x": "mxfp8", "w": "mxfp4", "dy": "mxfp8:e5m2"}.get)
        with quire.autocast(recipe=recipe):
            y = model(x)

    Every argument that takes a recipe also takes the equivalent text "x=mxfp8,w=mxfp4,dy=mxfp8:e5m2".

    "none" for x and for dy quantizes weights only: w is decoded, and multiplied with x as it is (numerics.md 6.12). A
    text can then leave dy out: "x=none,w=nvfp4". backward_override is then "dequantized" by default.

    Only dy can be rounded stochastically, w cannot have a Hadamard transform, and x and dy must have the same
    transform. A recipe that breaks these rules raises ValueError. The specs determine the formats; fp8_format and
    quantization_alignment have no effect and must keep their defaults.

    Args:
        qfactory: a function of "x", "w" or "dy" that returns a QuantSpec or its text, such as the method get of a dict.
        fp8_format: has no effect, and must keep its default.
        fp8_dpa: as for Float8CurrentScaling.
        fp8_mha: as for Float8CurrentScaling.
        backward_override: as for Float8CurrentScaling.
        quantization_alignment: has no effect, and must keep its default.

    Raises:
        TypeError: for an unknown field, if qfactory is no function, and if it returns something else than a QuantSpec
            or text.
        ValueError: for a text that is no spec, for specs that break the rules above, and for a value that a field does
            not take.
        NotImplementedError: if fp8_dpa or fp8_mha is True.
    """

    qfactory: Callable[[str], QuantSpec | str]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128

    def _check(self) -> None:
        if not callable(self.qfactory):
            remedy = ""
            if isinstance(self.qfactory, Mapping):
                remedy = f". Pass the method get of the dict: CustomRecipe({self.qfactory!r}.get)"
            elif isinstance(self.qfactory, str):
                remedy = f". A text is a recipe by itself: recipe={self.qfactory!r}"
            raise TypeError(
                f"CustomRecipe: qfactory must be callable with a role, 'x', 'w' or 'dy'; got {self.qfactory!r}{remedy}"
            )
        if self.fp8_format != Format.HYBRID:
            raise ValueError(
                f"CustomRecipe: fp8_format has no effect, got {self.fp8_format!r}. "
                "Say the format in the specs, as in 'mxfp8:e5m2'"
            )
        if self.quantization_alignment != 128:
            raise ValueError(
                "CustomRecipe: quantization_alignment has no effect, since every size is accepted; got "
                f"{self.quantization_alignment!r}. Leave it 128"
            )
        check_shared_fields(self)

    def _specs(self) -> LinearSpec:
        specs = LinearSpec(*[self._role(role) for role in ("x", "w", "dy")])
        check_recipe("CustomRecipe", specs.text)
        return specs

    def _role(self, role: str) -> str:
        spec = self.qfactory(role)
        if not isinstance(spec, str | QuantSpec):
            raise TypeError(
                f"CustomRecipe: qfactory({role!r}) must return a QuantSpec or its text, got {describe(spec)}; "
                f"{self._hint(role)}"
            )
        if spec == "none":
            return spec
        return as_spec(f"CustomRecipe: {role}", spec).text

    def _hint(self, role: str) -> str:
        """What to return for a role, for errors."""
        if role != "dy":
            return f"return a spec for {role}, such as 'mxfp8', or 'none' for x and dy to quantize weights only"
        return f"dy is the gradient of y. {fitting_dy(*[str(self.qfactory(other)) for other in ('x', 'w')])}"

    def __repr__(self) -> str:
        return f"CustomRecipe({self.specs.text!r})"

    @classmethod
    def custom(cls) -> bool:
        return True
