"""Measures which recipe is the fastest on this machine."""

from dataclasses import dataclass

import torch

from quire.checks import check_type, near
from quire.conversion.convert import MIN_FEATURES
from quire.conversion.inference import inference_recipe
from quire.conversion.reparametrized import plain_class, steady_weights, why_not_converted
from quire.conversion.report import counted, megabytes, milliseconds
from quire.conversion.timing import Kind, check_tokens, has_values, measure, slower
from quire.nn.linear import Linear
from quire.recipe import from_name, names
from quire.tensor import DTYPES

GOALS = ("inference", "training", "memory")
#: A recipe must be this much faster than high precision to be worth a loss of accuracy.
_WORTH = 1.05


@dataclass(frozen=True)
class RecipeEstimate:
    """The time and memory of all linear layers of a model under a recipe.

    name: "high precision", or the name of a recipe.
    seconds: the time of one call of each layer, with backward for the goal "training". Layers that become more than 5 %
        slower are not converted, as in quire.convert(for_inference=True, tokens=...): they count with their present
        time.
    weight_bytes: the bytes of all weights after this conversion.
    converted: the number of layers that are converted. For the goal "memory", of all that can be converted.
    seconds_of_all: the time of one call of each layer if all layers are converted.
    """

    name: str
    seconds: float
    weight_bytes: int
    converted: int
    seconds_of_all: float


@dataclass(frozen=True)
class Recommendation:
    """The result of quire.recommend. str() gives a table.

    recipe: the name of the recommended recipe, or None if no recipe is better. layers: the number of layers that can be
    converted, those of at least min_features. estimates: high precision first, then the recipes, the best for the goal
    first.
    """

    goal: str
    tokens: int
    recipe: str | None
    layers: int
    estimates: tuple[RecipeEstimate, ...]

    def __str__(self) -> str:
        plain = self.estimates[0]
        steps = "a forward and a backward pass" if self.goal == "training" else "a forward pass"
        lines = [f"{steps} of the linear layers with {counted(self.tokens, 'row')} on this machine, and their weights:"]
        for it in self.estimates:
            ratio = f"{plain.seconds / it.seconds:.2f} times as fast"
            layers = "" if it is plain else f"  {it.converted} of {counted(self.layers, 'layer')} converted"
            if it is not plain and it.converted < self.layers:
                layers += f"; with all, {plain.seconds / it.seconds_of_all:.2f} times"
            sizes = f"{milliseconds(it.seconds):>9}  {ratio}  {megabytes(it.weight_bytes):>8}{layers}"
            lines.append(f"  {it.name:<15} {sizes}")
        why_not = "has smaller weights" if self.goal == "memory" else "is more than 5 % faster"
        return "\n".join([*lines, f"for {self.goal}: {self.recipe or f'high precision, since no recipe {why_not}'}"])

    __repr__ = __str__


def recommend(
    model: torch.nn.Module, tokens: int = 1, goal: str = "inference", *, min_features: int = MIN_FEATURES
) -> Recommendation:
    """Times the model's torch.nn.Linear and quire.Linear layers under every recipe except delayed scaling, with random
    inputs, and recommends one of the recipes.

    tokens: rows of x in a typical call: batch size times sequence length, 1 for a model that generates token by token.
    goal: "inference" compares forward passes with weights as in quire.convert(for_inference=True); "training" compares
        forward and backward passes; "memory" selects the smallest weights for inference.
    min_features: layers with fewer inputs or outputs are not counted, since quire.convert does not convert them.

    One layer of each kind is timed, as quire.convert(for_inference=True, tokens=...) does, about two seconds in all;
    large layers and many rows take longer. Delayed scaling takes the time of fp8_current or less and is not timed: a
    layer cannot have it as its own recipe. Accuracy is not measured: 8-bit recipes are closer to high precision than
    4-bit recipes. Call it within the torch.autocast that the model will run within. A quire.autocast around the call
    has no effect.

    Raises ValueError if the model has no layer that can be converted and timed, or for an unknown goal.
    """
    check_type("recommend", torch.nn.Module, model=model)
    check_type("recommend", int, tokens=tokens)
    check_tokens("recommend", tokens)
    check_type("recommend", str, goal=goal)
    if goal not in GOALS:
        raise ValueError(
            f"recommend: goal must be one of {', '.join(map(repr, GOALS))}, got {goal!r}{near(goal, GOALS)}"
        )
    with steady_weights(model):
        layers = [layer for layer in model.modules() if _timed(layer, min_features)]
    if not layers:
        raise ValueError(
            f"recommend: {type(model).__name__} has no torch.nn.Linear with {min_features} inputs and outputs and "
            "values in float32, float16 or bfloat16; pass a model that has, or another min_features"
        )
    by_name = {name: from_name(name) for name in names(delayed=False)}
    training = goal == "training"
    recipes = [it if training else inference_recipe(it) for it in by_name.values()]
    with steady_weights(model):
        kinds = measure(layers, recipes, tokens, training)
    plain, *found = [_estimate(name, i, kinds, goal) for i, name in enumerate(("high precision", *by_name))]
    best = sorted(found, key=lambda it: (it.weight_bytes, it.seconds) if goal == "memory" else (it.seconds, 0))
    pays = best[0].weight_bytes < plain.weight_bytes if goal == "memory" else plain.seconds > _WORTH * best[0].seconds
    return Recommendation(goal, tokens, best[0].name if pays else None, len(layers), (plain, *best))


def _timed(layer: torch.nn.Module, min_features: int) -> bool:
    if plain_class(layer) not in (torch.nn.Linear, Linear) or why_not_converted(layer, ("weight",), training=False):
        return False
    if layer.weight.dtype not in DTYPES:
        return False
    return has_values(layer) and min(layer.in_features, layer.out_features) >= min_features


def _estimate(name: str, i: int, kinds: list[Kind], goal: str) -> RecipeEstimate:
    """i: the place of the recipe in each Kind's lists."""
    seconds, seconds_of_all, size, converted = 0.0, 0.0, 0, 0
    for kind in kinds:
        n = len(kind.layers)
        used = 0 if goal != "memory" and slower(kind.seconds[0], kind.seconds[i]) else i
        seconds += n * kind.seconds[used]
        seconds_of_all += n * kind.seconds[i]
        size += n * kind.weight_bytes[used]
        converted += n * (used > 0)
    return RecipeEstimate(name, seconds, size, converted, seconds_of_all)
