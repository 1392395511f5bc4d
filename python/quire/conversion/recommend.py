"""Measures which recipe is the fastest on this machine."""

from dataclasses import dataclass

import torch

from quire.checks import check_type
from quire.conversion.convert import MIN_FEATURES
from quire.conversion.inference import inference_recipe
from quire.conversion.report import megabytes, milliseconds
from quire.conversion.timing import (
    SECONDS,
    alike,
    best_of,
    check_tokens,
    has_values,
    inference_call,
    input_of,
    training_call,
)
from quire.nn.linear import Linear
from quire.recipe import Recipe, from_name, names
from quire.tensor import DTYPES

GOALS = ("inference", "training", "memory")
#: What is not this much quicker than high precision pays for no loss of accuracy.
_WORTH = 1.05


@dataclass(frozen=True)
class RecipeEstimate:
    """The time and memory of all linear layers of a model under a recipe. Layers that would not gain are not converted.

    name: "high precision", or the name of a recipe. seconds: one call of each layer, with backward for the goal
    "training". weight_bytes: of the weights. converted: the number of layers that gain.
    """

    name: str
    seconds: float
    weight_bytes: int
    converted: int


@dataclass(frozen=True)
class Recommendation:
    """The result of quire.recommend. str() gives a table.

    recipe: the name of the recommended recipe, or None if no recipe gains. layers: the number of layers that can be
    converted. estimates: high precision first, then the recipes, the best for the goal first.
    """

    goal: str
    tokens: int
    recipe: str | None
    layers: int
    estimates: tuple[RecipeEstimate, ...]

    def __str__(self) -> str:
        plain = self.estimates[0]
        steps = "a forward and a backward pass" if self.goal == "training" else "a forward pass"
        lines = [f"{steps} of the linear layers with {self.tokens} rows on this machine, and their weights:"]
        for it in self.estimates:
            ratio = f"{plain.seconds / it.seconds:.2f} times as fast"
            layers = "" if it is plain else f"  {it.converted} of {self.layers} layers gain"
            sizes = f"{milliseconds(it.seconds):>9}  {ratio}  {megabytes(it.weight_bytes):>8}{layers}"
            lines.append(f"  {it.name:<15} {sizes}")
        return "\n".join([*lines, f"for {self.goal}: {self.recipe or 'high precision: no recipe pays'}"])

    __repr__ = __str__


def recommend(
    model: torch.nn.Module, tokens: int = 1, goal: str = "inference", *, min_features: int = MIN_FEATURES
) -> Recommendation:
    """Times the model's torch.nn.Linear and quire.Linear layers under every recipe, with random inputs, and recommends
    one of the recipes.

    tokens: rows of x in a typical call: batch size times sequence length, 1 for a model that generates token by token.
    goal: "inference" compares forward passes with weights as in quire.convert(for_inference=True); "training" compares
        forward and backward passes; "memory" selects the smallest weights for inference.
    min_features: as for quire.convert.

    One layer of each kind is timed, about two seconds in all; large layers and many rows take longer. Delayed scaling
    takes the time of fp8_current or less and is not timed. Accuracy is not measured: 8-bit recipes are closer to high
    precision than 4-bit recipes. Call it within the torch.autocast that the model will run within.

    Raises ValueError if the model has no layer that can be converted and timed, or for an unknown goal.
    """
    check_type("recommend", torch.nn.Module, model=model)
    check_type("recommend", int, tokens=tokens)
    check_tokens("recommend", tokens)
    if goal not in GOALS:
        raise ValueError(f"recommend: goal must be one of {', '.join(map(repr, GOALS))}, got {goal!r}")
    layers = [layer for layer in model.modules() if _timed(layer, min_features)]
    if not layers:
        raise ValueError(
            f"recommend: {type(model).__name__} has no torch.nn.Linear with {min_features} inputs and outputs and "
            "values in float32, float16 or bfloat16; pass a model that has, or another min_features"
        )
    recipes = {name: from_name(name) for name in names() if not from_name(name).delayed()}
    plain, *found = _estimates(layers, recipes, tokens, goal)
    best = sorted(found, key=lambda it: (it.weight_bytes, it.seconds) if goal == "memory" else (it.seconds, 0))
    pays = best[0].weight_bytes < plain.weight_bytes if goal == "memory" else plain.seconds > _WORTH * best[0].seconds
    return Recommendation(goal, tokens, best[0].name if pays else None, len(layers), (plain, *best))


def _timed(layer: torch.nn.Module, min_features: int) -> bool:
    if type(layer) not in (torch.nn.Linear, Linear) or layer.weight.dtype not in DTYPES:
        return False
    return has_values(layer) and min(layer.in_features, layer.out_features) >= min_features


def _estimates(
    layers: list[torch.nn.Linear], by_name: dict[str, Recipe], tokens: int, goal: str
) -> list[RecipeEstimate]:
    """High precision first."""
    kinds, training = alike(layers), goal == "training"
    call_of = training_call if training else inference_call
    sums = {name: [0.0, 0, 0] for name in ("high precision", *by_name)}
    recipes = [it if training else inference_recipe(it) for it in by_name.values()]
    for same in kinds:
        x = input_of(same[0], tokens)
        calls = [call_of(same[0], x, it) for it in (None, *recipes)]
        with torch.set_grad_enabled(training):
            times = best_of([call for call, _ in calls], SECONDS / len(kinds))
        sizes = [size for _, size in calls]
        for total, seconds, size in zip(sums.values(), times, sizes, strict=True):
            gains = seconds < times[0] or (goal == "memory" and size < sizes[0])
            total[0] += len(same) * (seconds if gains else times[0])
            total[1] += len(same) * (size if gains else sizes[0])
            total[2] += len(same) * gains
    return [RecipeEstimate(name, *total) for name, total in sums.items()]
