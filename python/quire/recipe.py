"""Recipes: which quantization each operand of a Linear gets.

A recipe is an immutable value whose meaning for a Linear is one line of text (`linear_spec()`), the `recipe` argument
of the operators. Names, fields and defaults are TransformerEngine's (numerics.md 6.4), except that nothing is read from
the environment and that every field does what it says or is refused (numerics.md 0.14).
"""

import difflib
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.tensor import QuantSpec


class Format(enum.Enum):
    """Element formats of forward tensors (x and w) and of gradients (dy). numerics.md 1.1."""

    E2M1 = "E2M1"
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"  #: E4M3 forward, E5M2 for gradients


@dataclass(frozen=True)
class MMParams:
    """How one product may be summed. True asks for float32 sums, False permits coarser ones.

    Sums are float32 here in either case (numerics.md 0.20), so both values are kept.
    """

    use_split_accumulator: bool = True


# Functions, because Dynamo can call neither a default that is an MMParams nor a class from a dataclass's closure.
def _fast() -> MMParams:
    return MMParams(use_split_accumulator=False)


def _split() -> MMParams:
    return MMParams(use_split_accumulator=True)


@dataclass(frozen=True)
class Recipe:
    """What all recipes have in common. Construct one of the subclasses; fields that cannot be honoured raise there.

    Two recipes of one class and text are the same to a compiled graph: the text is all that a layer reads.
    """

    def __post_init__(self) -> None:
        self._check()
        text = self._text()
        # Kept, so that a forward pass costs an attribute and a compiled graph guards on one string.
        object.__setattr__(self, "_linear_spec", text)
        object.__setattr__(self, "_stochastic", "sr" in text.split(",")[2].split(":"))

    def _check(self) -> None:
        """Raises ValueError, TypeError or NotImplementedError, naming recipe, field, value and remedy."""
        raise TypeError(
            f"Recipe is abstract; construct one of {', '.join(_BY_NAME)} by quire.recipe.from_name, or its class"
        )

    def _text(self) -> str:
        raise NotImplementedError

    def linear_spec(self) -> str:
        """ "x=SPEC,w=SPEC,dy=SPEC" with the specs of docs/specs.md."""
        return self._linear_spec

    @property
    def stochastic(self) -> bool:
        """Whether gradients are rounded stochastically, and so a Linear's random state is used."""
        return self._stochastic

    def delayed(self) -> bool:
        """Always False: see DelayedScaling."""
        return False

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def nvfp4(self) -> bool:
        return isinstance(self, NVFP4BlockScaling)

    def custom(self) -> bool:
        return isinstance(self, CustomRecipe)


def _spec(family: str, *options: str) -> str:
    """The text of a spec; empty options are left out."""
    return ":".join([family, *[option for option in options if option]])


def _one_of(recipe: Recipe, name: str, *allowed: object) -> None:
    value = getattr(recipe, name)
    if value not in allowed:
        listed = ", ".join(str(a) if isinstance(a, enum.Enum) else repr(a) for a in allowed)
        raise ValueError(f"{type(recipe).__name__}: {name} must be one of {listed}; got {value!r}")


def _check_shared_fields(recipe: Recipe) -> None:
    name = type(recipe).__name__
    if recipe.fp8_dpa or recipe.fp8_mha:
        raise NotImplementedError(
            f"{name}: fp8_dpa and fp8_mha are options of attention, which quire does not quantize; "
            f"got fp8_dpa={recipe.fp8_dpa!r}, fp8_mha={recipe.fp8_mha!r}. Leave both False"
        )
    if recipe.backward_override is not None:
        raise NotImplementedError(
            f"{name}: backward_override={recipe.backward_override!r} is not available in this version. Leave it None"
        )


def _check_fp8_format(recipe: Recipe) -> None:
    _one_of(recipe, "fp8_format", Format.E4M3, Format.HYBRID)


def _gradient_element(recipe: Recipe) -> str:
    return "e5m2" if recipe.fp8_format == Format.HYBRID else ""


def _check_products(recipe: Recipe, split: bool) -> None:
    for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        value = getattr(recipe, name)
        if not isinstance(value, MMParams):
            raise TypeError(f"{type(recipe).__name__}: {name} must be an MMParams, got {value!r}")
        if split and not value.use_split_accumulator:
            raise ValueError(
                f"{type(recipe).__name__}: {name} must have use_split_accumulator=True: scales of 128 values are "
                f"applied to float32 sums; got {value!r}. Leave it at its default"
            )


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one float32 scale a tensor, from the tensor's own amax (numerics.md 2).

    use_power_2_scales: truncate scales to powers of two, for all three operands.
    fp8_format: HYBRID (gradients E5M2) or E4M3.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = field(default_factory=_fast)
    fp8_gemm_dgrad: MMParams = field(default_factory=_split)
    fp8_gemm_wgrad: MMParams = field(default_factory=_split)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def _check(self) -> None:
        _one_of(self, "use_power_2_scales", False, True)
        _check_fp8_format(self)
        _check_products(self, split=False)
        _check_shared_fields(self)

    def _text(self) -> str:
        pow2 = "pow2" if self.use_power_2_scales else ""
        forward = _spec("fp8_tensor", pow2)
        return f"x={forward},w={forward},dy={_spec('fp8_tensor', _gradient_element(self), pow2)}"


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with a scale for each 1 x 128 or 128 x 128 values (numerics.md 3).

    use_f32_scales: keep scales as float32 instead of truncating them to powers of two.
    x_, w_, grad_block_scaling_dim: 1 for 1 x 128, 2 for 128 x 128; the operands of a product may not both have 2.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = field(default_factory=_split)
    fp8_gemm_dgrad: MMParams = field(default_factory=_split)
    fp8_gemm_wgrad: MMParams = field(default_factory=_split)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def _check(self) -> None:
        _one_of(self, "use_f32_scales", False, True)
        _check_fp8_format(self)
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for name in dims:
            _one_of(self, name, 1, 2)
        if [getattr(self, name) for name in dims].count(2) > 1:
            raise ValueError(
                "Float8BlockScaling: the two operands of a product may not both have 128 x 128 blocks; got "
                + ", ".join(f"{name}={getattr(self, name)}" for name in dims)
                + ". Set all but one to 1"
            )
        _check_products(self, split=True)
        _check_shared_fields(self)

    def _text(self) -> str:
        pow2 = "" if self.use_f32_scales else "pow2"
        tile = {1: "", 2: "128x128"}
        x = _spec("fp8_block", tile[self.x_block_scaling_dim], pow2)
        w = _spec("fp8_block", tile[self.w_block_scaling_dim], pow2)
        dy = _spec("fp8_block", _gradient_element(self), tile[self.grad_block_scaling_dim], pow2)
        return f"x={x},w={w},dy={dy}"


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power-of-two scale byte for each 32 values (numerics.md 4).

    enable_2d_quantization: weights get one scale for each 32 x 32 values, the same in both directions.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def _check(self) -> None:
        if self.margin != 0:
            raise ValueError(
                f"MXFP8BlockScaling: margin belongs to delayed scaling and has no meaning here; got {self.margin!r}. "
                "Leave it 0"
            )
        _check_fp8_format(self)
        _one_of(self, "enable_2d_quantization", False, True)
        _check_shared_fields(self)

    def _text(self) -> str:
        w = _spec("mxfp8", "32x32" if self.enable_2d_quantization else "")
        return f"x=mxfp8,w={w},dy={_spec('mxfp8', _gradient_element(self))}"


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """FP4 with an E4M3 scale byte for each 16 values, under one float32 amax (numerics.md 5).

    disable_rht: no Hadamard transform of the operands of the weight gradient.
    disable_stochastic_rounding: round gradients to nearest.
    disable_2d_quantization: weights get a scale for each 1 x 16 instead of 16 x 16 values.
    row_scaled_activation: x has one amax a row; needs disable_rht.
    nvfp4_4over6: 'none', 'weights', 'activations' or 'all' choose the better of two scales a block; 'activations' and
        'all' need disable_rht. Gradients never do.
    nvfp4_4over6_e4m3_use_256: which of those reach 256 instead of 448 with their scale bytes.
    nvfp4_4over6_err_mode: 'MAE' or 'MSE', what "better" means.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def _check(self) -> None:
        for name in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "row_scaled_activation"):
            _one_of(self, name, False, True)
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            _one_of(self, name, "none", "weights", "activations", "all")
        _one_of(self, "nvfp4_4over6_err_mode", "MAE", "MSE")
        _one_of(self, "fp4_format", Format.E2M1)
        _one_of(self, "fp8_format", Format.E4M3)
        _check_shared_fields(self)
        four_over_six = self.nvfp4_4over6 in ("activations", "all")
        if self.row_scaled_activation and not self.disable_rht:
            raise ValueError(
                "NVFP4BlockScaling: row_scaled_activation=True needs disable_rht=True: the amaxes of rows are those of "
                "the untransformed tensor. Set disable_rht=True"
            )
        if four_over_six and not self.disable_rht:
            raise ValueError(
                f"NVFP4BlockScaling: nvfp4_4over6={self.nvfp4_4over6!r} needs disable_rht=True: 4over6 is not defined "
                "on transformed activations. Set disable_rht=True, or nvfp4_4over6='weights'"
            )
        if four_over_six and self.row_scaled_activation:
            raise ValueError(
                f"NVFP4BlockScaling: nvfp4_4over6={self.nvfp4_4over6!r} and row_scaled_activation=True exclude each "
                "other: 4over6 needs one amax a tensor. Set row_scaled_activation=False, or nvfp4_4over6='weights'"
            )

    def _four_over_six(self, operand: str) -> tuple[str, str]:
        if self.nvfp4_4over6 not in (operand, "all"):
            return "", ""
        return f"4over6={self.nvfp4_4over6_err_mode.lower()}", (
            "256" if self.nvfp4_4over6_e4m3_use_256 in (operand, "all") else ""
        )

    def _text(self) -> str:
        rht = "" if self.disable_rht else "rht"
        row_scaled = "row_scaled" if self.row_scaled_activation else ""
        x = _spec("nvfp4", row_scaled, rht, *self._four_over_six("activations"))
        w = _spec("nvfp4", "" if self.disable_2d_quantization else "16x16", *self._four_over_six("weights"))
        dy = _spec("nvfp4", rht, "" if self.disable_stochastic_rounding else "sr")
        return f"x={x},w={w},dy={dy}"


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Any spec for any operand: qfactory is called once for each of "x", "w" and "dy", at construction, and returns a
    QuantSpec or its text.

    Only dy may round stochastically, w may not be Hadamard-transformed, x and dy must be transformed alike: a recipe
    that breaks this is refused by the first forward pass. The formats are those of the texts; fp8_format and
    quantization_alignment, which TransformerEngine has here, have nothing to act on and must keep their defaults.
    """

    qfactory: Callable[[str], QuantSpec | str]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128

    def _check(self) -> None:
        if not callable(self.qfactory):
            raise TypeError(
                f"CustomRecipe: qfactory must be callable with a role, 'x', 'w' or 'dy'; got {self.qfactory!r}"
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
        _check_shared_fields(self)

    def _text(self) -> str:
        return ",".join([f"{role}={self._role(role)}" for role in ("x", "w", "dy")])

    def _role(self, role: str) -> str:
        spec = self.qfactory(role)
        if not isinstance(spec, str | QuantSpec):
            raise TypeError(f"CustomRecipe: qfactory({role!r}) must return a QuantSpec or its text, got {spec!r}")
        return spec.text if isinstance(spec, QuantSpec) else QuantSpec(spec).text


class DelayedScaling:
    """Not available in this version; constructing it says so."""

    def __init__(self, *args: object, **fields: object) -> None:
        raise NotImplementedError(
            "DelayedScaling: delayed scaling is not available in this version. Float8CurrentScaling has the same "
            "formats with scales of the current tensor, MXFP8BlockScaling is the default"
        )


_BY_NAME: dict[str, type[Recipe]] = {
    "nvfp4": NVFP4BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "fp8_current": Float8CurrentScaling,
    "fp8_block": Float8BlockScaling,
}


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
