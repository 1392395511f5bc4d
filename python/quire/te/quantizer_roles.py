"""Quantizers that a function of the user chooses by role (CustomRecipe), as a recipe of quire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import quire.recipe
from quire.loading.deferred import assume_constant_result
from quire.recipe import Format, Recipe
from quire.recipe.linear_spec import LinearSpec
from quire.te.quantizers import Quantizer
from quire.tensor import QuantSpec
from quire.tensor.spec import check_recipe

#: Operand -> TransformerEngine's name of it.
_TENSOR_TYPES = {"x": "input", "w": "weight", "dy": "grad_output"}
_MODULE_TYPES = ("linear", "grouped_linear")


@dataclass(frozen=True, eq=False)
class QuantizerRole(str):
    """What is quantized. str() gives TransformerEngine's earlier name for it, such as "linear_weight".

    module_type: "linear" or "grouped_linear". tensor_type: "input", "weight" or "grad_output". name: of the layer, as
    its argument `name` says; the two matmuls of a LayerNormMLP are name.fc1 and name.fc2.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __new__(cls, module_type: str = "", tensor_type: str = "", name: str = "") -> QuantizerRole:
        return super().__new__(cls, "_".join([part for part in (module_type, tensor_type) if part]))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, QuantizerRole):
            return self._parts() == other._parts()
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:  # str has one of its own
        return not self == other

    __hash__ = str.__hash__

    def __str__(self) -> str:
        names = zip(("module_type", "tensor_type", "name"), self._parts(), strict=True)
        return "|".join([f"{name}={part}" for name, part in names if part]) or "QuantizerRole()"

    def _parts(self) -> tuple[str, str, str]:
        return self.module_type, self.tensor_type, self.name


class _Probe(QuantizerRole):
    """A role that remembers whether somebody has read the name of the layer, which is not known yet."""

    def __getattribute__(self, attribute: str) -> Any:
        if attribute == "name":
            object.__getattribute__(self, "__dict__")["asked"] = True
        return super().__getattribute__(attribute)


@dataclass(frozen=True)
class QuantizerRequest:
    """The base class of what a qfactory can return instead of a quantizer: ways to quantize that have a state."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Delayed scaling: the fields are those of quire.recipe.DelayedScaling. A qfactory that returns several for the
    tensors of one matmul returns equal ones."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True


class IdentityQuantizer:
    """What a qfactory returns for a tensor that stays in high precision. It returns tensors as they are."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass(frozen=True)
class _Answers:
    """What a qfactory returned for the three operands of a matmul: texts of specs, "none", or requests."""

    x: str | QuantizerRequest
    w: str | QuantizerRequest
    dy: str | QuantizerRequest

    def __call__(self, operand: str) -> str:
        return getattr(self, operand)

    def recipe(self, fields: dict[str, Any]) -> Recipe | None:
        """The recipe that quantizes like this, None if nothing is quantized. fields: of quire.recipe.CustomRecipe."""
        each = (self.x, self.w, self.dy)
        if each == ("none",) * 3:
            return None
        if self.w == "none":
            raise NotImplementedError(
                "CustomRecipe: qfactory must return a quantizer for the weight if it returns one for the input or for "
                f"the gradient: a matmul has two quantized operands, or a quantized weight; got {_listed(each)}. "
                "Return a quantizer for the weight, or None for all three"
            )
        requests = [one for one in each if isinstance(one, DelayedScalingRequest)]
        if requests:
            if any(one != requests[0] for one in requests):
                raise NotImplementedError(
                    "CustomRecipe: the DelayedScalingRequests that qfactory returns for the tensors of a matmul must "
                    f"be equal: a matmul has one state of delayed scaling; got {_listed(each)}"
                )
            attention = {name: fields[name] for name in ("fp8_dpa", "fp8_mha", "backward_override")}
            if len(requests) < 3:
                return PartlyDelayedScaling(self, requests[0], **attention)
            return quire.recipe.DelayedScaling(**vars(requests[0]), **attention)
        return quire.recipe.CustomRecipe(self, **fields)


class PartlyDelayedScaling(quire.recipe.DelayedScaling):
    """Delayed scaling of one or two operands of a matmul, and other specs for the rest."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, answers: _Answers, request: DelayedScalingRequest, **attention: object) -> None:
        operands = [name for name in _TENSOR_TYPES if answers(name) == request]
        object.__setattr__(self, "answers", answers)
        object.__setattr__(self, "delayed_operands", tuple(operands))
        super().__init__(**vars(request), **attention)

    def _specs(self) -> LinearSpec:
        own = super()._specs()
        each = [getattr(own if name in self.delayed_operands else self.answers, name) for name in _TENSOR_TYPES]
        specs = LinearSpec(*each)
        check_recipe("CustomRecipe", specs.text)
        return specs


def _listed(answers: tuple[object, ...]) -> str:
    return ", ".join([f"{answer} for {tensor}" for tensor, answer in zip(_TENSOR_TYPES.values(), answers, strict=True)])


def _answers(qfactory: Callable[[QuantizerRole], object], kind: type[QuantizerRole], *where: str) -> tuple:
    """The _Answers for a matmul of a layer, and whether the factory has asked for the layer's name. where: type and
    name of the layer."""
    module_type, name = where
    roles = {operand: kind(module_type, tensor, name) for operand, tensor in _TENSOR_TYPES.items()}
    found = {operand: _answer(role, qfactory(role)) for operand, role in roles.items()}
    return _Answers(**found), any(["asked" in vars(role) for role in roles.values()])


def _answer(role: QuantizerRole, answer: object) -> str | QuantizerRequest:
    if answer is None or isinstance(answer, IdentityQuantizer):
        return "none"
    if isinstance(answer, Quantizer):
        spec = answer.spec
        # As in all recipes, values that are not finite reach the output (numerics.md 1.9).
        return spec.text if "nan" in spec.options else QuantSpec(f"{spec.text}:nan").text
    if isinstance(answer, DelayedScalingRequest | str):
        return answer if isinstance(answer, QuantizerRequest) else QuantSpec(answer).text
    if isinstance(answer, QuantSpec):
        return answer.text
    raise TypeError(
        f"CustomRecipe: qfactory must return a quantizer, a DelayedScalingRequest, a QuantSpec or its text, or None "
        f"for high precision; got {answer!r} for {role}"
    )


def check_factory(qfactory: object) -> None:
    """Raises TypeError for what cannot be called."""
    if not callable(qfactory):
        remedy = "; pass its method get" if isinstance(qfactory, Mapping) else ""
        raise TypeError(f"CustomRecipe: qfactory must be callable with a QuantizerRole; got {qfactory!r}{remedy}")


def recipe_of_factory(qfactory: Callable[[QuantizerRole], object], **fields: Any) -> Recipe:
    """The recipe that quantizes as the quantizers of a qfactory. The factory is called for the operands of a linear and
    of a grouped linear layer; if its answers differ, or it asks for the name of the layer, or it raises for one of
    them, the recipe is another one for each layer (Recipe.of_layer). fields: of quire.recipe.CustomRecipe. Raises
    TypeError, ValueError or NotImplementedError for what no recipe can do, and what the factory raises for both."""
    check_factory(qfactory)
    found, errors = [], []
    for module_type in _MODULE_TYPES:
        try:
            found.append(_answers(qfactory, _Probe, module_type, ""))
        except Exception as error:  # whatever a function of the user's raises; a layer of that type meets it again
            errors.append(error)
    if not found:
        raise errors[0]
    (answers, _), *others = found
    uniform = not errors and not any([asked for _, asked in found]) and all([other == answers for other, _ in others])
    if not uniform or answers.recipe(fields) is None:
        return _OfLayers(_ByName(qfactory), **fields)
    return answers.recipe(fields)


@dataclass(frozen=True)
class _ByName:
    """The answers of a recipe that differs by layer before a layer is known."""

    qfactory: Callable[[QuantizerRole], object]

    def __call__(self, operand: str) -> str:
        return "mxfp8" if operand == "w" else "none"


class _OfLayers(quire.recipe.CustomRecipe):
    """A recipe that asks a qfactory for each layer, once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "given_override", self.backward_override)
        super().__post_init__()
        object.__setattr__(self, "made", {})

    def of_layer(self, layer: torch.nn.Module) -> Recipe | None:
        """The recipe of a layer; None for high precision. Raises NotImplementedError for what no recipe can do."""
        key = (
            "grouped_linear" if hasattr(layer, "num_gemms") else "linear",
            getattr(layer, "name", None) or "",
            layer.products,
        )
        return getattr(self, _make(self, *key) if torch.compiler.is_compiling() else _made(self, *key))


def _made(recipe: _OfLayers, *key: object) -> str:
    """The attribute of the recipe that holds the recipe of a layer."""
    # Attributes, because Dynamo reads a whole dict at once and would miss what is added while it traces.
    if key not in recipe.made:
        name = f"made{len(recipe.made)}"
        object.__setattr__(recipe, name, _recipe_of_layer(recipe, *key))
        recipe.made[key] = name
    return recipe.made[key]


@assume_constant_result
def _make(recipe: _OfLayers, *key: object) -> str:
    return _made(recipe, *key)


class _OfProducts(Recipe):
    """The recipe of a layer whose matmuls have different recipes. Read as one recipe, it is the first that
    quantizes."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, each: dict[str, Recipe | None]) -> None:
        first = next(one for one in each.values() if one is not None)
        vars(self).update(vars(first), each=each)

    def of_product(self, product: str) -> Recipe | None:
        return self.each[product]


def _recipe_of_layer(recipe: _OfLayers, module_type: str, name: str, products: tuple[str, ...]) -> Recipe | None:
    factory = recipe.qfactory.qfactory
    fields = {field: getattr(recipe, field) for field in ("fp8_format", "fp8_dpa", "fp8_mha")}
    fields["backward_override"] = recipe.given_override
    parts = [".".join([part for part in (name, product) if part]) for product in products]
    found = [_answers(factory, QuantizerRole, module_type, part)[0] for part in parts]
    made = [answers.recipe(fields) for answers in found]
    same = all([answers == found[0] for answers in found])
    return made[0] if same else _OfProducts(dict(zip(products, made, strict=True)))
