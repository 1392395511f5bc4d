"""Common parts of recipes: element formats, the base class, checks of shared fields."""

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple, TypeVar

from quire.checks import check_options, check_type
from quire.recipe.linear_spec import LinearSpec


class Largest(NamedTuple):
    """The largest values of the element formats of forward tensors and of gradients."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Element formats of forward tensors (x and w) and of gradients (dy), each by its Largest. numerics.md 1.1."""

    E2M1 = Largest(6.0, 6.0)
    E4M3 = Largest(448.0, 448.0)
    E5M2 = Largest(57344.0, 57344.0)
    HYBRID = Largest(448.0, 57344.0)  #: E4M3 forward, E5M2 for gradients

    def __repr__(self) -> str:
        return f"Format.{self.name}"


@dataclass(frozen=True)
class QParams:
    """The quantization of one operand, field by field: the content of a recipe's text, for reading.

    Args:
        power_2_scale: whether scales are powers of two.
        amax_epsilon: the least amax from which a scale is computed.
        random_hadamard_transform: whether groups of tokens are transformed.
        stochastic_rounding: whether elements are rounded stochastically.
        fp4_2d_quantization: whether a scale is for 16 x 16 values.

    Raises:
        TypeError: for a flag that is no bool, and an amax_epsilon that is no number.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        check_type("QParams", float | int, amax_epsilon=values.pop("amax_epsilon"))
        check_type("QParams", bool, **values)


@dataclass(frozen=True)
class MMParams:
    """The precision of the sums of one matmul. True requests float32 sums; False permits lower precision.

    quire uses float32 sums in both cases (numerics.md 0.20), so both values have the same result.

    Args:
        use_split_accumulator: True requests float32 sums. False permits lower precision.

    Raises:
        TypeError: unless it is a bool.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        check_type("MMParams", bool, use_split_accumulator=self.use_split_accumulator)


Class = TypeVar("Class", bound=type)


def recipe_class(cls: Class) -> Class:
    """A dataclass that lists its fields when it receives an unknown field."""
    construct, names = cls.__init__, [field.name for field in fields(cls)]

    @functools.wraps(construct)
    def __init__(self: object, *args: object, **values: object) -> None:
        check_options(cls.__name__, names, values)
        construct(self, *args, **values)

    cls.__init__ = __init__
    return cls


# Functions, because Dynamo can call neither a default that is an MMParams nor a class from a dataclass's closure.
def fast() -> MMParams:
    return MMParams(use_split_accumulator=False)


def split() -> MMParams:
    return MMParams(use_split_accumulator=True)


@dataclass(frozen=True)
class Recipe:
    """The base class of all recipes. Construct one of the subclasses; a field value that is not available raises an
    error there.

    Two recipes of one class and text are equal for a compiled graph, because a layer reads only the text.

    Attributes:
        input_spec: the canonical text of the spec for x.
        weight_spec: the canonical text of the spec for w.
        stochastic: whether gradients are rounded stochastically, which uses a Linear's random state.
        specs: specs_for() without options.
        batch_invariant_specs: the same within quire.batch_invariant.
        delayed_operands: those of "x", "w" and "dy" whose scales come from earlier steps.
        weight_only: whether x and gradients are not quantized: both specs are "none".
        static_input: whether x has a static scale, the layer's `input_scale` (the option `given`).
        of_layer: None; a subclass whose recipe differs by layer has a method of this name: layer -> the recipe of that
            layer, or None for high precision. Only quire.autocast takes such a recipe.
        by_layer: whether there is one.
    """

    of_layer: ClassVar[Callable[[object], "Recipe | None"] | None] = None
    delayed_operands: ClassVar[tuple[str, ...]] = ()

    def in_force(self) -> "Recipe | None":
        """What quire.active_recipe() returns where this is the recipe of the innermost autocast."""
        return self

    def of_product(self, product: str) -> "Recipe | None":
        """The recipe of a matmul of the layer whose recipe this is; None for high precision."""
        return self

    def __post_init__(self) -> None:
        self._check()
        specs = self._specs()
        # Kept, so that a forward pass costs attributes and a compiled graph guards on strings.
        object.__setattr__(self, "weight_only", specs.x == "none")
        if self.weight_only and self.backward_override is None:
            object.__setattr__(self, "backward_override", "dequantized")
        roles, backward = (specs.x, specs.w, specs.dy), self.backward_override or ""
        specs = LinearSpec(*roles, backward=backward)
        object.__setattr__(self, "specs", specs)
        invariant = LinearSpec(*roles, backward=backward, kernels="batch_invariant")
        object.__setattr__(self, "batch_invariant_specs", invariant)
        object.__setattr__(self, "input_spec", specs.x)
        object.__setattr__(self, "weight_spec", specs.w)
        object.__setattr__(self, "stochastic", "sr" in specs.dy.split(":"))
        object.__setattr__(self, "static_input", "given" in specs.x.split(":"))
        object.__setattr__(self, "by_layer", self.of_layer is not None)

    def _check(self) -> None:
        """Raises ValueError, TypeError or NotImplementedError, naming recipe, field, value and remedy."""
        raise TypeError("Recipe is abstract; construct one of its subclasses, or one by name: quire.recipe.from_name")

    def _specs(self) -> LinearSpec:
        """Those of x, w and dy."""
        raise NotImplementedError

    def specs_for(
        self, fp8_grad: bool = False, save_original_input: bool = False, batch_invariant: bool = False
    ) -> LinearSpec:
        """The specs of a call.

        Args:
            fp8_grad: dx is rounded to the format of dy, to nearest and without a transform.
            save_original_input: the unquantized x is saved, and quantized in backward for the weight gradient; it has
                no effect under a backward_override. Neither has an effect if weight_only.
            batch_invariant: kernels=batch_invariant (numerics.md 7.8).
        """
        own = self.batch_invariant_specs if batch_invariant else self.specs
        if not (fp8_grad or save_original_input) or self.weight_only:
            return own
        options = [option for option in own.dy.split(":") if option.split("=")[0] not in ("rht", "sr")]
        backward = own.backward or ("requantized" if save_original_input else "")
        return LinearSpec(own.x, own.w, own.dy, ":".join(options) if fp8_grad else "", backward, own.kernels)

    def linear_spec(self, fp8_grad: bool = False, save_original_input: bool = False) -> str:
        """The text of specs_for(): the `recipe` argument of the operators (docs/specs.md).

        Args:
            fp8_grad: as for specs_for().
            save_original_input: as for specs_for().

        Raises:
            TypeError: for a flag that is no bool.
        """
        what = f"{type(self).__name__}.linear_spec"
        check_type(what, bool, fp8_grad=fp8_grad, save_original_input=save_original_input)
        return self.specs_for(fp8_grad, save_original_input).text

    # Which class it is, of classes and of recipes; each overrides its own.
    @classmethod
    def delayed(cls) -> bool:
        return False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return False

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return False

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        return False

    @classmethod
    def mxfp4(cls) -> bool:
        return False

    @classmethod
    def nvfp4(cls) -> bool:
        return False

    @classmethod
    def custom(cls) -> bool:
        return False


def operand_params(operand: str) -> property:
    """A property of a recipe: QParams of "x", "w" or "dy"."""

    def read(recipe: Recipe) -> QParams:
        options = getattr(recipe.specs, operand).split(":")[1:]
        return QParams(
            power_2_scale="pow2" in options,
            random_hadamard_transform="rht" in options,
            stochastic_rounding="sr" in options,
            fp4_2d_quantization="16x16" in options,
        )

    return property(read, doc="QParams of an operand, to be read; the fields of the recipe decide.")


def spec(family: str, *options: str) -> str:
    """The text of a spec of a recipe, with the option `nan`: values that are not finite reach the output (numerics.md
    1.9). Empty options are omitted."""
    return ":".join([family, *[option for option in options if option], "nan"])


def one_of(recipe: Recipe, name: str, *allowed: object) -> None:
    value = getattr(recipe, name)
    if value not in allowed:
        listed = ", ".join(str(a) if isinstance(a, enum.Enum) else repr(a) for a in allowed)
        raise ValueError(f"{type(recipe).__name__}: {name} must be one of {listed}; got {value!r}")


def whole_number(recipe: Recipe, name: str, least: int, most: int) -> None:
    value = getattr(recipe, name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{type(recipe).__name__}: {name} must be an int between {least} and {most}; got {value!r}")


def check_shared_fields(recipe: Recipe) -> None:
    name = type(recipe).__name__
    if recipe.fp8_dpa or recipe.fp8_mha:
        raise NotImplementedError(
            f"{name}: fp8_dpa and fp8_mha are options of attention, which quire does not quantize; "
            f"got fp8_dpa={recipe.fp8_dpa!r}, fp8_mha={recipe.fp8_mha!r}. Leave both False"
        )
    # Its gradients would not collect amaxes (numerics.md 6.8).
    one_of(recipe, "backward_override", None, *(() if recipe.delayed() else ("high_precision", "dequantized")))


def check_fp8_format(recipe: Recipe) -> None:
    one_of(recipe, "fp8_format", Format.E4M3, Format.HYBRID)


def gradient_element(recipe: Recipe) -> str:
    return "e5m2" if recipe.fp8_format == Format.HYBRID else ""


def check_products(recipe: Recipe, split: bool) -> None:
    for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        value = getattr(recipe, name)
        if not isinstance(value, MMParams):
            raise TypeError(f"{type(recipe).__name__}: {name} must be an MMParams, got {value!r}")
        if split and not value.use_split_accumulator:
            raise ValueError(
                f"{type(recipe).__name__}: {name} must have use_split_accumulator=True: scales of 128 values are "
                f"applied to float32 sums; got {value!r}. Leave it at its default"
            )
