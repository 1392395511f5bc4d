"""transformer_engine.common.recipe: recipes with the same names, fields and defaults, whose fields can be set.

quire.recipe has immutable recipes of the same names. quire takes both, everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import torch

import quire.recipe
from quire.checks import check_options, near
from quire.loading.deferred import assume_constant_result
from quire.recipe import Format, MMParams, QParams
from quire.recipe.base import operand_params
from quire.recipe.linear_spec import LinearSpec
from quire.te.quantizer_roles import check_factory, recipe_of_factory

# --- what all have in common: fields that can be set, over an immutable recipe of quire


Class = TypeVar("Class", bound=type)
#: QParams of x, w and dy.
Params = tuple[QParams, QParams, QParams]


class Recipe:
    """The base class of TransformerEngine's recipes. Construct one of the subclasses.

    The fields of a recipe can be set at any time. An autocast reads them when it is entered, everything else that takes
    a recipe when it takes it: each takes frozen(). Values are checked in the constructor and when they are read, so
    that fields which depend on each other can be set one after the other.
    """

    #: The class of quire with the same fields.
    kind: type[quire.recipe.Recipe] = quire.recipe.Recipe
    _names: tuple[str, ...] = ()
    #: Attributes that are no fields and can be set too: QParams of x, w and dy, None where none were set.
    _params_names: tuple[str, ...] = ()
    _params: tuple[QParams | None, ...] = (None, None, None)
    _made: tuple[tuple[object, ...], quire.recipe.Recipe] | None = None
    #: Whether instances accept attributes of any name, as instances of subclasses do.
    _open = False

    def __init_subclass__(cls) -> None:
        cls._open = True

    def __init__(self) -> None:
        raise TypeError("Recipe is abstract; construct one of its subclasses, such as DelayedScaling()")

    def __post_init__(self) -> None:
        self.frozen()

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._params_names:
            if not isinstance(value, QParams):
                raise TypeError(f"{type(self).__name__}: {name} must be a QParams, got {value!r}")
            new = [value if name == own else old for own, old in zip(self._params_names, self._params, strict=True)]
            object.__setattr__(self, "_params", tuple(new))
            return
        if name not in self._names and not self._open:
            known = (*self._names, *self._params_names)
            raise AttributeError(
                f"{type(self).__name__}: there is no field {name!r}; the fields are {', '.join(known)}"
                f"{near(name, known)}"
            )
        object.__setattr__(self, name, value)

    def frozen(self) -> quire.recipe.Recipe:
        """The immutable recipe of the fields as they are now. Raises ValueError, TypeError or NotImplementedError for
        values that do not fit."""
        values = (*[getattr(self, name) for name in self._names], *self._params)
        if self._made is not None and self._made[0] == values:
            return self._made[1]
        made = self._recipe(dict(zip(self._names, values, strict=False)))
        object.__setattr__(made, "settable", self)
        if not torch.compiler.is_dynamo_compiling():  # a graph would change this object at each call
            object.__setattr__(self, "_made", (values, made))
        return made

    def _recipe(self, fields: dict[str, Any]) -> quire.recipe.Recipe:
        """The recipe of these fields and of the QParams that were set."""
        if self._params == (None, None, None):
            return self.kind(**fields)
        params = tuple([own or other for own, other in zip(self._params, self._default_params(), strict=True)])
        found = self._fields_of(params)
        if found is not None:
            return self.kind(**{**fields, **found})
        specs = self.kind(**{**fields, **self._any_params()}).specs
        each = [with_params(spec, own) for spec, own in zip((specs.x, specs.w, specs.dy), params, strict=True)]
        text = LinearSpec(*each, backward=fields["backward_override"] or "").text
        return quire.recipe.as_recipe(type(self).__name__, text)

    def _default_params(self) -> Params:
        """The QParams that follow from the fields."""
        raise NotImplementedError

    def _fields_of(self, params: Params) -> dict[str, bool] | None:
        """The fields from which these QParams follow; None if there are none."""
        raise NotImplementedError

    def _any_params(self) -> dict[str, bool]:
        """Values of these fields that fit all other fields."""
        return {}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, quire.recipe.Recipe):
            return self.frozen() == other
        if type(other) is not type(self):
            return NotImplemented
        return _state(self) == _state(other)

    __hash__ = None  # as of everything that is equal by values which can change

    def __getstate__(self) -> dict[str, object]:
        return _state(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in self._names]
        params = zip(self._params_names, self._params, strict=False)
        shown += [f"{name}={value!r}" for name, value in params if value is not None]
        return f"{type(self).__name__}({', '.join(shown)})"

    # These tell the class of a recipe, and can be called on the class too.
    @classmethod
    def delayed(cls) -> bool:
        return cls.kind.delayed()

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return cls.kind.float8_current_scaling()

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return cls.kind.float8_per_tensor_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return cls.kind.float8_block_scaling()

    @classmethod
    def mxfp8(cls) -> bool:
        return cls.kind.mxfp8()

    @classmethod
    def nvfp4(cls) -> bool:
        return cls.kind.nvfp4()

    @classmethod
    def custom(cls) -> bool:
        return cls.kind.custom()


def _state(recipe: Recipe) -> dict[str, object]:
    return {name: value for name, value in vars(recipe).items() if name != "_made"}


def with_params(spec: str, params: QParams) -> str:
    """A spec with the options that QParams ask for, and without those that they exclude."""
    family, *options = spec.split(":")
    others = [option for option in options if option.split("=")[0] not in ("pow2", "eps", "rht", "sr", "16x16")]
    said = {
        "pow2": params.power_2_scale,
        f"eps={float(params.amax_epsilon)!r}": params.amax_epsilon,
        "rht": params.random_hadamard_transform,
        "sr": params.stochastic_rounding,
        "16x16": params.fp4_2d_quantization,
    }
    return ":".join([family, *[option for option, wanted in said.items() if wanted], *others])


def _params_of(operand: int, name: str) -> property:
    def read(self: Recipe) -> QParams:
        own = self._params[operand]
        return operand_params(("x", "w", "dy")[operand]).fget(self.frozen()) if own is None else own

    return property(read, doc=f"QParams of an operand, which follow from the fields until {name} is set.")


@dataclass_transform(eq_default=False)
def settable(kind: type[quire.recipe.Recipe], *params: str) -> Callable[[Class], Class]:
    """A dataclass with the fields and defaults of a recipe of quire. params: the attributes that hold the QParams of x,
    w and dy, if it has any."""

    def decorate(cls: Class) -> Class:
        own = dataclasses.fields(kind)
        cls.__annotations__ = {field.name: field.type for field in own}
        for field in own:
            if field.default is not dataclasses.MISSING:
                setattr(cls, field.name, field.default)
            elif field.default_factory is not dataclasses.MISSING:
                setattr(cls, field.name, dataclasses.field(default_factory=field.default_factory))
        for operand, name in enumerate(params):
            setattr(cls, name, _params_of(operand, name))
        cls.kind, cls._names, cls._params_names, cls._open = kind, tuple(cls.__annotations__), params, False
        made = dataclasses.dataclass(eq=False, repr=False)(cls)
        construct = made.__init__

        @functools.wraps(construct)
        def __init__(self: object, *args: object, **values: object) -> None:
            check_options(cls.__name__, cls._names, values)
            construct(self, *args, **values)

        made.__init__ = __init__
        return made

    return decorate


# --- the recipes


@settable(quire.recipe.DelayedScaling)
class DelayedScaling(Recipe):
    """quire.recipe.DelayedScaling, whose fields can be set."""


class _PowersOfTwo(Recipe):
    """Recipes with one field that says for x, w and dy whether scales are powers of two."""

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
