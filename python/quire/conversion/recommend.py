"""Measures which recipe is the fastest on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.checks import check_sizes, check_type, counted, near
from quire.conversion.convert import MIN_FEATURES
from quire.conversion.inference import inference_recipe
from quire.conversion.reparametrized import plain_class, steady_weights, why_not_converted
from quire.conversion.report import Reason, megabytes, milliseconds
from quire.conversion.timing import Kind, check_tokens, has_values, measure, slower
from quire.distributed.fully_sharded import MasterShard, fsdp_groups
from quire.distributed.placements import is_dtensor
from quire.nn.linear import Linear
from quire.nn.product_module import ProductModule
from quire.nn.stacked_experts import is_experts
from quire.recipe import Recipe, as_recipe, from_name, names
from quire.tensor import DTYPES, QuantizedTensor

GOALS = ("inference", "training", "memory")
#: A recipe must be this much faster than high precision to be worth a loss of accuracy.
_WORTH = 1.05
#: Times that differ by less are equal: they would differ as much in another measurement.
_NOISE = 1.05
_ALL_SLOWER = Reason("each would be more than 5 % slower on this machine", "Try another number of tokens")
#: Recipe -> by how many percent it raises the perplexity of SmolLM2-135M (docs/language-model.md).
PERPLEXITY = {
    "fp8_current": 2.9,
    "fp8_block": 3.6,
    "mxfp8": 3.6,
    "nvfp4": 49.6,
    "mxfp4": 273.0,
    "x=none,w=nvfp4": 24.4,
    "x=none,w=mxfp4": 47.2,
    "x=nvfp4,w=mxfp8,dy=mxfp8": 18.9,
}


@dataclass(frozen=True)
class RecipeEstimate:
    """The time and memory of all linear layers of a model under a recipe.

    Attributes:
        name: "high precision", or the name of a recipe.
        seconds: the time of one call of each layer, with backward for the goal "training". Layers that become more than
            5 % slower are not converted, as in quire.convert(for_inference=True, tokens=...): they count with their
            present time.
        weight_bytes: the bytes of all weights after this conversion.
        converted: the number of layers that are converted. For the goal "memory", of all that can be converted.
        seconds_of_all: the time of one call of each layer if all layers are converted.
        why_not: why the recipe converts no layer, "" if it converts some. Such a recipe is not ranked.
    """

    name: str
    seconds: float
    weight_bytes: int
    converted: int
    seconds_of_all: float
    why_not: str = ""


@dataclass(frozen=True)
class Recommendation:
    """The result of quire.recommend. str() gives a table.

    Attributes:
        goal: the goal that was passed.
        tokens: the number of tokens that was passed.
        recipe: the name of the recommended recipe, or None if no recipe is better.
        layers: the number of layers that can be converted, those of at least min_features.
        estimates: high precision first, then the recipes, the fastest first, and for the goal "memory" the smallest;
            last the recipes that convert no layer, the one that would be the fastest first.
        equal: the names of the recipes that are as good as the best one for the goal: less than 5 % slower, or of the
            same size. `recipe` is one of them with the most bits, NVFP4 before MXFP4.
        dtypes: those of the weights of the layers, with which the recipes are compared.
        autocast: the dtype of the torch.autocast within which they were compared, None outside of one.
    """

    goal: str
    tokens: int
    recipe: str | None
    layers: int
    estimates: tuple[RecipeEstimate, ...]
    equal: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    autocast: torch.dtype | None = None

    def __str__(self) -> str:
        plain = self.estimates[0]
        steps = "a forward and a backward pass" if self.goal == "training" else "a forward pass"
        dtypes = " and ".join(map(_words, self.dtypes))
        within = "" if self.autocast is None else f", within torch.autocast ({_words(self.autocast)})"
        lines = [
            f"{steps} of the linear layers, whose weights are in {dtypes}{within}, with {counted(self.tokens, 'row')} "
            "on this machine, and the bytes of the weights:"
        ]
        width = max(15, *(len(it.name) for it in self.estimates))
        for it in self.estimates:
            of_all = f"{plain.seconds / it.seconds_of_all:.2f} times"
            if it.why_not:
                lines.append(
                    f"  {it.name:<{width}} converts no layer: {it.why_not}; with all converted, {of_all} the speed"
                )
                continue
            ratio = f"{plain.seconds / it.seconds:.2f} times as fast"
            layers = "" if it is plain else f"  {it.converted} of {counted(self.layers, 'layer')} converted"
            if it is not plain and it.converted < self.layers:
                layers += f"; with all, {of_all}"
            sizes = f"{milliseconds(it.seconds):>9}  {ratio}  {megabytes(it.weight_bytes):>8}{layers}"
            lines.append(f"  {it.name:<{width}} {sizes}")
        lines += self._on_accuracy()
        why_not = "has smaller weights" if self.goal == "memory" else "is more than 5 % faster"
        chosen = f"high precision, since no recipe {why_not}" if self.recipe is None else self.recipe + self._caution()
        return "\n".join([*lines, f"for {self.goal}: {chosen}"])

    def _caution(self) -> str:
        """What stands behind a recipe of 4 bits: the best one of 8 bits, if there is one."""
        ranked = [it for it in self.estimates[1:] if not it.why_not]
        eight = next((it for it in ranked if _roughness(as_recipe("recommend", it.name))[0] == _EIGHT_BITS), None)
        if _roughness(as_recipe("recommend", self.recipe))[0] <= _EIGHT_BITS or eight is None:
            return ""
        if self.goal == "memory":
            return f" (by size alone: evaluate it; with 8 bits, {eight.name} has {megabytes(eight.weight_bytes)})"
        ratio = self.estimates[0].seconds / eight.seconds
        of_eight = f"{eight.name} has {ratio:.2f} times the speed of high precision"
        return f" (by speed alone: evaluate it; with 8 bits, {of_eight})"

    def _on_accuracy(self) -> list[str]:
        """Which recipes are equal otherwise, and what is known."""
        known = {as_recipe("recommend", name).linear_spec(): rise for name, rise in PERPLEXITY.items()}
        rises = {it.name: known.get(as_recipe("recommend", it.name).linear_spec()) for it in self.estimates[1:]}
        measured = [f"{name} {rise:+g} %" for name, rise in rises.items() if rise is not None]
        others = [name for name, rise in rises.items() if rise is None]
        known = f"accuracy is not measured here; perplexity of SmolLM2-135M: {', '.join(measured)}"
        lines = [f"{known}; no figure for {', '.join(others)}" if others else known]
        if self.recipe is not None and len(self.equal) > 1:
            how = "of the same size" if self.goal == "memory" else "less than 5 % apart, which is noise"
            why = f"{self.recipe} is taken for its format (8 bits before 4, NVFP4 before MXFP4)"
            lines.append(f"{how}: {', '.join(self.equal)}; {why}")
        return lines

    __repr__ = __str__


def recommend(
    model: torch.nn.Module,
    tokens: int = 1,
    goal: str = "inference",
    *,
    recipes: Sequence[Recipe | str] = (),
    min_features: int = MIN_FEATURES,
) -> Recommendation:
    """Times the model's torch.nn.Linear and quire.Linear layers under every recipe except delayed scaling, with random
    inputs, and recommends one of the recipes.

    One layer of each kind is timed, as quire.convert(for_inference=True, tokens=...) does, about two seconds in all;
    large layers and many rows take longer. Delayed scaling is not timed, because a layer cannot have it as its own
    recipe. It can take longer than fp8_current, above all in small layers. Accuracy is not measured. Of recipes whose
    times differ by less than 5 %, which is noise, the one with the more accurate formats is recommended: 8 bits before
    4, NVFP4 before MXFP4. The comparison is with the model as it is: pass it in the dtype that you will use, and within
    the torch.autocast that it will run within. A quire.autocast around the call has no effect.

    Args:
        model: the model. It does not change.
        tokens: rows of x in a typical call: batch size times sequence length, 1 for a model that generates token by
            token.
        goal: "inference" compares forward passes with weights as in quire.convert(for_inference=True); "training"
            compares forward and backward passes; "memory" selects the smallest weights for inference.
        recipes: recipes of your own that are timed too, such as "x=mxfp8,w=nvfp4,dy=mxfp8".
        min_features: layers with fewer inputs or outputs are not counted, since quire.convert does not convert them.

    Returns:
        A Recommendation. str() gives a table.

    Raises:
        ValueError: if the model has no layer that can be converted and timed, for weights that are sharded over ranks,
            for tokens below 1, an unknown goal, and recipes that cannot be timed: delayed scaling, and static scales of
            x.
        TypeError: for arguments of a wrong type.
    """
    check_type("recommend", torch.nn.Module, model=model)
    if isinstance(tokens, str):
        raise TypeError(
            f"recommend: tokens must be an int, the number of rows of x, got {tokens!r}; the goal is passed as "
            f"goal={' or '.join(map(repr, GOALS))}{near(tokens, GOALS)}"
        )
    check_type("recommend", int, tokens=tokens)
    check_tokens("recommend", tokens)
    check_sizes("recommend", min_features=min_features)
    check_type("recommend", str, goal=goal)
    if goal not in GOALS:
        raise ValueError(
            f"recommend: goal must be one of {', '.join(map(repr, GOALS))}, got {goal!r}{near(goal, GOALS)}"
        )
    by_name = {name: from_name(name) for name in names(delayed=False)} | _own(recipes)
    layers = _layers(model, min_features)
    training = goal == "training"
    timed = [it if training else inference_recipe(it) for it in by_name.values()]
    with steady_weights(model):
        kinds = measure(layers, timed, tokens, training)
        dtypes = tuple(dict.fromkeys(layer.weight.dtype for layer in layers))
    plain, *found = [_estimate(name, i, kinds, goal) for i, name in enumerate(("high precision", *by_name))]
    best = sorted(
        (it for it in found if not it.why_not),
        key=lambda it: (it.weight_bytes, it.seconds) if goal == "memory" else (it.seconds, 0),
    )
    equal = _equal(best, goal)
    chosen = min(equal, key=lambda it: _roughness(by_name[it.name]), default=plain)
    pays = chosen.weight_bytes < plain.weight_bytes if goal == "memory" else plain.seconds > _WORTH * chosen.seconds
    return Recommendation(
        goal,
        tokens,
        chosen.name if pays else None,
        len(layers),
        (plain, *best, *sorted((it for it in found if it.why_not), key=lambda it: it.seconds_of_all)),
        tuple(it.name for it in equal),
        dtypes,
        _autocast_of(layers[0].weight.device.type),
    )


def _layers(model: torch.nn.Module, min_features: int) -> list[torch.nn.Module]:
    """Those that are timed. Raises ValueError if there is none, and for sharded ones: what is left would say nothing of
    the model."""
    sharded = [name or "the model itself" for name, layer in model.named_modules() if _is_sharded(layer)]
    if sharded:
        raise ValueError(
            f"recommend: weights of {type(model).__name__} are sharded over ranks, and only whole layers are timed; "
            f"sharded are {', '.join(sharded[:3])}{', ...' if sharded[3:] else ''}; call recommend before fully_shard, "
            "gather_codes, shard_weights or parallelize_module, for layers that are made without parallel="
        )
    with steady_weights(model):
        layers = [layer for layer in model.modules() if _timed(layer, min_features)]
    if not layers:
        raise ValueError(
            f"recommend: {type(model).__name__} has no torch.nn.Linear with at least {min_features} inputs and outputs "
            "and values in float32, float16 or bfloat16; " + _remedy(model)
        )
    return layers


def _is_sharded(layer: torch.nn.Module) -> bool:
    """Whether it is a linear layer of which this rank has a part, or that fully_shard has given another class."""
    if not isinstance(layer, torch.nn.Linear):
        return False
    weight = layer._parameters.get("weight")
    parallel = isinstance(layer, Linear) and layer.parallel is not None
    return parallel or is_dtensor(weight) or isinstance(weight, MasterShard) or bool(fsdp_groups(layer))


def _remedy(model: torch.nn.Module) -> str:
    """For a model without a layer that can be timed."""
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    if linear and any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters()):
        return (
            "its weights are quantized; pass the model as it was before, or call quire.dequantize_weights(model) first"
        )
    if linear and any(parameter.is_meta for parameter in model.parameters()):
        return (
            "its weights are on the meta device, where no time can be measured; load them first, or time any values: "
            "model.to_empty(device='cpu')"
        )
    if others := sorted({type(module).__name__ for module in model.modules() if _has_no_row(module)}):
        return (
            f"experts are not timed, nor layers with a norm, here {' and '.join(others)}; time a linear layer of the "
            "same sizes: quire.recommend(torch.nn.Linear(in_features, out_features), tokens)"
        )
    return "pass a model that has, or another min_features"


def _has_no_row(module: torch.nn.Module) -> bool:
    """Whether quire.convert can convert it, and it is no linear layer."""
    return is_experts(module) or (isinstance(module, ProductModule) and not isinstance(module, Linear))


def _autocast_of(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _equal(best: Sequence[RecipeEstimate], goal: str) -> list[RecipeEstimate]:
    """Those that are as good as the first one."""
    if goal == "memory":
        return [it for it in best if it.weight_bytes == best[0].weight_bytes]
    return [it for it in best if it.seconds < _NOISE * best[0].seconds]


def _own(recipes: Sequence[Recipe | str]) -> dict[str, Recipe]:
    """The caller's recipes by their names or texts. Raises TypeError or ValueError for what a layer cannot have."""
    if isinstance(recipes, Recipe | str) or not isinstance(recipes, Sequence):
        remedy = f"[{recipes!r}]" if isinstance(recipes, Recipe | str) else "a list of recipes or of their texts"
        raise TypeError(f"recommend: recipes must be a list of recipes, got {recipes!r}; pass {remedy}")
    found, named = {}, {from_name(name).linear_spec() for name in names(delayed=False)}
    for given in recipes:
        recipe = as_recipe("recommend", given)
        if recipe is None or recipe.delayed():
            raise ValueError(
                f"recommend: recipes must not have {given!r}, which a layer cannot have as its own; leave it out"
            )
        if recipe.static_input:
            raise ValueError(
                f"recommend: recipes must not have {given!r}, whose static scale of x comes from quire.calibrate; pass "
                "the recipe without the option 'given', and time the calibrated model yourself"
            )
        if recipe.linear_spec() in named:
            continue
        found[given if isinstance(given, str) else recipe.linear_spec()] = recipe
    return found


#: Family of a spec -> how rough its values are. What is not here has 8 bits.
_EIGHT_BITS = 1
_ROUGH = {"none": 0, "nvfp4": 2, "mxfp4": 3}


def _roughness(recipe: Recipe) -> tuple[int, int]:
    """The order of recipes by accuracy: first the roughest operand of the forward pass counts, then both."""
    each = [_ROUGH.get(spec.split(":")[0], _EIGHT_BITS) for spec in (recipe.input_spec, recipe.weight_spec)]
    return max(each), sum(each)


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
    return RecipeEstimate(name, seconds, size, converted, seconds_of_all, "" if converted or i == 0 else _ALL_SLOWER)
