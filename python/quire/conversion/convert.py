"""Conversion of a model's torch.nn.Linear layers to quire.Linear, for training or for inference."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from quire.checks import check_sizes, check_type, counted, describe
from quire.conversion.held import Places, held_bytes, places_of, untied
from quire.conversion.inference import (
    check_gradients,
    has_inference_codes,
    inference_recipe,
    quantize_for_inference,
    why_not_quantized,
    why_other_codes,
)
from quire.conversion.reparametrized import (
    NO_WEIGHT_YET,
    PARAMETRIZED,
    SHARDED,
    has_no_weight_yet,
    plain_class,
    plain_weights,
    steady_weights,
    why_not_converted,
)
from quire.conversion.report import (
    ConversionReport,
    LayerReport,
    Reason,
    keep_report,
    layer_lines,
    left_notes,
    left_parameters,
    milliseconds,
    notes_on_fast_paths,
    other_parameters,
    remedy_of,
    untied_notes,
)
from quire.conversion.timing import check_tokens, has_values, measure, slower
from quire.nn.linear import Linear, applied_sharding
from quire.nn.own_context import own_context
from quire.nn.product_module import ProductModule, checked_recipe
from quire.nn.random_state import reset_streams
from quire.nn.stacked_experts import StackedExperts, is_experts, weight_names, why_not_adopted
from quire.recipe import Recipe, names
from quire.tensor import DTYPES
from quire.tensor.writes import SAME_LAYERS

_FILTERED = Reason("the filter says so", "Pass another filter")

#: Layers with fewer inputs or outputs are left alone.
MIN_FEATURES = 256


@dataclass(frozen=True)
class Plan:
    """What is to become of the layers. recipe: their own. tokens: rows of x in the calls to time, None for none."""

    recipe: Recipe | None
    for_inference: bool
    tokens: int | None


@dataclass(frozen=True)
class Selection:
    """Which layers are to be converted. found: every layer that may be, with all its names. why_not: why each is left,
    "" if it is converted. seconds: of one call before and after, of layers that were timed. places, nbytes: of the
    model's parameters and of all its tensors, before."""

    model: torch.nn.Module
    found: dict[torch.nn.Module, list[str]]
    why_not: dict[torch.nn.Module, str]
    seconds: dict[torch.nn.Module, tuple[float, float]]
    plan: Plan
    places: Places
    nbytes: int

    @property
    def chosen(self) -> list[torch.nn.Module]:
        return [layer for layer, why in self.why_not.items() if not why]

    def plain_weights(self) -> AbstractContextManager[dict[torch.nn.Module, str]]:
        """Those of the chosen layers, for inference: see quire/conversion/reparametrized.py."""
        return plain_weights(self.chosen if self.plan.for_inference else ())


def convert(
    model: torch.nn.Module,
    recipe: Recipe | str | None = None,
    filter: Callable[[torch.nn.Module, str], bool] | None = None,
    *,
    min_features: int = MIN_FEATURES,
    for_inference: bool = False,
    like: Literal["training"] | None = None,
    tokens: int | None = 1,
    gradients: Literal["input"] | None = None,
) -> torch.nn.Module:
    """Converts the model's torch.nn.Linear layers to quire.Linear, in place, and returns the model. The experts of
    mixtures of Hugging Face transformers become layers of quire too. The model's layers of quire (Linear,
    LayerNormLinear, LayerNormMLP, GroupedLinear, and those within MoE) get the recipe. With for_inference=True the
    default tokens=1 times the layers, and leaves those that would become slower on this machine as they are;
    tokens=None converts all.

    Each layer stays the same object, with its hooks, flags and names. For training its parameters stay the same objects
    too. So optimizers, tied weights and other references continue to work, and the state dict does not change. The
    model itself can be the layer. A layer on the meta device gets its random state when it is moved to another device
    (quire.Linear).

    Some layers are not converted: subclasses of torch.nn.Linear, whose forward method may differ; layers whose forward
    method was replaced; layers of other dtypes than float32, float16 and bfloat16; layers whose weight is sparse, of
    another library's class or not initialised yet; for training parametrized layers; and for inference layers whose
    weight is no parameter (a buffer, a plain tensor). quire.conversion_report(model) states the reason for each layer.

    Args:
        model: a model of any layers, or a layer. It changes in place.
        recipe: a recipe, its name or its text. Outside of every quire.autocast the layers use this recipe. Within a
            quire.autocast, also a disabled one, the autocast decides. None: the layers have no recipe of their own.
            Delayed scaling raises an error here, because only quire.autocast can select it.
        filter: a function (module, its name in the model) -> whether to convert it. It is called for every
            torch.nn.Linear, for the experts of every mixture, and for every layer of quire. If a module has several
            names, the function is called for each name, and must return true for all of them. None converts all layers.
            A filter can only leave out layers: min_features holds besides it.
        min_features: layers of PyTorch and transformers with fewer inputs or outputs are not converted, because no
            recipe makes such small layers faster; 0 or more. Layers of quire are converted whatever their size. No size
            is padded.
        for_inference: the weights are quantized once and become parameters of the class QuantizedTensor, rowwise only,
            in the order that matmuls with few tokens read fastest (quire.prepack_weights). Their values in high
            precision are freed. Under NVFP4 a weight gets one scale for 1 x 16 values. No parameter of a converted
            layer requires a gradient. You then need no quire.autocast to run, save or export the model. A weight that
            is tied to an embedding is untied, with a warning: the embedding keeps its values, and the layer gets codes.
            A weight that PyTorch computes in every call (torch.nn.utils.prune, weight_norm, spectral_norm, parametrize)
            is replaced by its value in evaluation mode, and what computes it is removed.
        like: "training", only with for_inference: the layers compute what they compute in training under the recipe,
            bit for bit, because weights keep its specs. Under NVFP4 a weight keeps one scale for 16 x 16 values. Use it
            where log-probabilities of a server are compared with those of the trainer (docs/invariance.md). None:
            weights get the scales with the smallest errors.
        tokens: the number of rows of x in a typical call; used only with for_inference. convert times one linear
            layer of each shape with that many rows, about two seconds in all, and does not convert those that would
            become more than 5 % slower. Other layers are converted without timing. Call convert within the same
            torch.autocast as the model later; a quire.autocast has no effect on the times. None: all layers are
            converted without timing, which needs the least memory.
        gradients: what a backward pass computes; used only with for_inference, with which no weight is trained. To
            train the weights, convert without for_inference. A training loop of a model converted for inference ends
            with PyTorch's error "element 0 of tensors does not require grad". None: nothing. Under most recipes the
            forward pass of a converted layer then raises an error if its input needs a gradient, as it does behind an
            embedding or a norm that requires gradients: call the model within torch.no_grad. "input": the gradient of
            each layer's input, in high precision, from the decoded weight. Low-rank adapters (LoRA) and other trained
            parts of the model need it. The bits of the forward pass and the state dict do not change. The recipe of the
            layers then ends with `backward=dequantized`.

    Returns:
        The model.

    Raises:
        ValueError: if there is nothing to convert, also if all layers would become slower: the error lists what was
            examined. For min_features below 0, tokens below 1, texts that an argument does not take, and, without
            for_inference, for tokens, gradients and like.
        TypeError: for arguments of a wrong type. The model is then unchanged.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
        >>> model = quire.convert(model, "mxfp8")
        >>> type(model[0]) is quire.Linear
        True

        To run a model without training it:

        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
        >>> model = quire.convert(model, "mxfp8", for_inference=True, tokens=None)
        >>> type(model[0].weight) is quire.QuantizedTensor
        True
    """
    check_type("convert", torch.nn.Module, model=model)
    check_type("convert", bool, for_inference=for_inference)
    check_chosen("convert", filter, min_features)
    check_tokens("convert", tokens)
    _check_like(like, for_inference)
    plan = _plan(checked_recipe("convert", recipe), for_inference, tokens, gradients, like)
    selection = select(model, plan, filter, min_features)
    with selection.plain_weights() as computed:
        report = carry_out(selection, {}, computed)
    for note in report.notes:
        warnings.warn(f"quire.convert: {note}; see quire.conversion_report(model)", stacklevel=2)
    return model


def select(model: torch.nn.Module, plan: Plan, filter: Callable | None, min_features: int) -> Selection:
    """The layers that convert(model, filter=filter, min_features=min_features) converts. Raises its ValueErrors."""
    found = _layers(model)
    with steady_weights(model):
        why_not = _why_each_is_left(found, plan, filter, min_features)
        chosen = {layer: its for layer, its in found.items() if not why_not[layer]}
        seconds = _times({layer: its for layer, its in chosen.items() if isinstance(layer, torch.nn.Linear)}, plan)
        why_not |= _why_slower(seconds, plan)
        if all(why_not.values()):
            raise ValueError(_nothing(model, found, why_not, plan))
    return Selection(model, found, why_not, seconds, plan, places_of(model), held_bytes(model))


def carry_out(
    selection: Selection, made: dict[int, torch.nn.Parameter], computed: dict[torch.nn.Module, str]
) -> ConversionReport:
    """Converts the selected layers, and keeps the report. made: as for quantize_for_inference. computed: what
    Selection.plain_weights() gave."""
    with steady_weights(selection.model):
        report = _convert(selection, made, computed)
    keep_report(selection.model, report)
    return report


def _convert(
    selection: Selection, made: dict[int, torch.nn.Parameter], computed: dict[torch.nn.Module, str]
) -> ConversionReport:
    model, found, why_not = selection.model, selection.found, selection.why_not
    seconds, plan, chosen = selection.seconds, selection.plan, selection.chosen
    before = {layer: _weight_bytes(layer) for layer in chosen if plan.for_inference}
    adopt(chosen, plan, made)
    layers = []
    for layer, its in found.items():
        sizes = (before[layer], _weight_bytes(layer)) if layer in before else None
        ours, why = isinstance(layer, ProductModule), str(why_not[layer])
        own = layer.recipe.linear_spec() if ours and layer.recipe is not None else None
        # A layer that an earlier call converted is not called left.
        said = {"why_not": "", "recipe": own, "kept": why} if ours else {"why_not": why}
        said |= {"weight_bytes": sizes, "seconds": seconds.get(layer), "computed": computed.get(layer, "")}
        said |= {"for_inference": has_inference_codes(layer), "inner_features": _inner_features(layer)}
        layers.append(LayerReport(tuple(its), *_sizes(layer), **said))
    left, apart = left_parameters(model), untied(model, selection.places)
    filtered = {name for layer, its in found.items() if why_not[layer] is _FILTERED for name in its}
    notes = (*notes_on_fast_paths(model, chosen), *untied_notes(apart), *left_notes(left, filtered))
    text = None if plan.recipe is None else plan.recipe.linear_spec()
    timed = plan.tokens if seconds else None
    held = (selection.nbytes, held_bytes(model))
    return ConversionReport(type(model).__name__, text, tuple(layers), notes, left, timed, held, apart)


def _plan(
    recipe: Recipe | None, for_inference: bool, tokens: int | None, gradients: str | None, like: str | None
) -> Plan:
    check_gradients("convert", gradients)
    if gradients is not None and not for_inference:
        raise ValueError(
            f"convert: gradients={gradients!r} needs for_inference=True; without it the layers have all gradients, "
            "those of their weights too"
        )
    if not for_inference:
        if tokens not in (None, 1):
            raise ValueError(
                f"convert: tokens={tokens!r} is the number of rows for which layers are timed with for_inference=True, "
                "and for_inference is False; pass for_inference=True, or leave tokens out"
            )
        return Plan(recipe, False, None)
    if recipe is None:
        raise ValueError(
            f"convert: for_inference=True needs a recipe, one of {', '.join(names(delayed=False))}; "
            "quire.recommend(model, tokens) measures which one is fastest on this machine"
        )
    return Plan(inference_recipe(recipe, gradients, like_training=like is not None), True, tokens)


def check_chosen(what: str, filter: object, min_features: object) -> None:
    """Raises TypeError or ValueError for arguments that cannot choose layers."""
    if filter is not None and not callable(filter):
        raise TypeError(
            f"{what}: filter must be a function of (module, name), got {describe(filter)}; "
            'to choose by name: lambda module, name: "lm_head" not in name'
        )
    check_sizes(what, min_features=min_features)


def _check_like(like: object, for_inference: bool) -> None:
    if like is None:
        return
    if like != "training":
        raise ValueError(f"convert: like must be 'training' or None, got {like!r}")
    if not for_inference:
        raise ValueError(
            "convert: like='training' says how weights for inference are quantized, and for_inference is False; pass "
            "for_inference=True, or leave like out"
        )


def _layers(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Every torch.nn.Linear, subclasses included, all experts in one tensor, and every layer of quire with matmuls,
    with all names."""
    kinds = (torch.nn.Linear, ProductModule)
    found: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds) or is_experts(module):
            found.setdefault(module, []).append(name)
    return found


def _why_each_is_left(
    found: dict[torch.nn.Module, list[str]], plan: Plan, filter: Callable | None, min_features: int
) -> dict[torch.nn.Module, str]:
    why_not = {layer: _why_not(layer, plan, min_features) for layer in found}
    for layer, its in found.items():
        if filter is not None and not _chooses(filter, layer, its):
            why_not[layer] = _FILTERED
    return why_not


def _chooses(filter: Callable, layer: torch.nn.Module, names: list[str]) -> bool:
    try:
        return all([filter(layer, name) for name in names])
    except Exception as error:
        error.add_note("in filter(module, name), the argument of quire's call")
        raise


def _why_not(layer: torch.nn.Module, plan: Plan, min_features: int) -> str:
    """Why the layer is not converted, filter and time apart; "" if it is."""
    if isinstance(layer, ProductModule):
        if plan.recipe is None:
            return f"it is a quire.{type(layer).__name__} already"
        return why_not_quantized(layer, plan.recipe, training=not plan.for_inference)
    if is_experts(layer):
        return why_not_adopted(layer) or _why_too_small(layer, min_features)
    return _why_not_linear(layer, plan) or _why_too_small(layer, min_features)


def _why_not_linear(layer: torch.nn.Linear, plan: Plan) -> str:
    training = not plan.for_inference
    if has_no_weight_yet(layer):
        return NO_WEIGHT_YET
    if plain_class(layer) is not torch.nn.Linear:
        return f"{type(layer).__name__} is a subclass of torch.nn.Linear, and may compute something else"
    if type(layer) is not torch.nn.Linear and training:
        return PARAMETRIZED
    if "forward" in vars(layer):
        return "its forward was replaced, and would not run quire.Linear's"
    if why := why_not_converted(layer, ("weight",), training):
        return why
    if layer.weight.dtype not in DTYPES:
        words = f"its weight is {str(layer.weight.dtype).removeprefix('torch.')}, not float32, float16 or bfloat16"
        return Reason(words, "Call model.float() or model.bfloat16() first")
    if plan.recipe is not None and (why := why_other_codes(layer, plan.recipe, training)):
        return why
    return _why_sharded_stays(layer, plan)


def _why_too_small(layer: torch.nn.Module, min_features: int) -> str:
    inputs, outputs = _sizes(layer)
    name, least = min(("in_features", inputs), ("out_features", outputs), key=lambda it: it[1])
    if least >= min_features:
        return ""
    return Reason(f"too small to gain, {name} < {min_features}", "Pass a smaller min_features")


def _why_sharded_stays(layer: torch.nn.Linear, plan: Plan) -> str:
    """Why a layer whose weight is sharded over ranks is not converted; "" if it is, and for other layers."""
    try:
        sharded = applied_sharding(layer) is not None
    except ValueError as error:
        return str(error)
    return SHARDED if sharded and plan.for_inference else ""


def _times(layers: dict[torch.nn.Module, list[str]], plan: Plan) -> dict[torch.nn.Module, tuple[float, float]]:
    """The seconds of one call, before and after, for layers with values in high precision. One layer of each kind is
    timed."""
    if plan.tokens is None:
        return {}
    for layer, its in layers.items():
        if layer.weight.is_meta:
            raise ValueError(
                f"convert: {its[0] or 'the model'} is on the meta device, where no time can be measured. Pass "
                "tokens=None. If the state dict to load is of a model of which some layers were converted, convert the "
                f"same ones: {SAME_LAYERS}"
            )
    kinds = measure([layer for layer in layers if has_values(layer)], [plan.recipe], plan.tokens)
    return {layer: tuple(kind.seconds) for kind in kinds for layer in kind.layers}


def _why_slower(seconds: dict[torch.nn.Module, tuple[float, float]], plan: Plan) -> dict[torch.nn.Module, str]:
    rows = "" if plan.tokens is None else counted(plan.tokens, "row")
    remedy = "Pass tokens=None to convert what is slower, or the recipe of quire.recommend(model, tokens)"
    return {
        layer: Reason(
            f"slower on this machine, {milliseconds(now)} with {rows}, {milliseconds(before)} as it is", remedy
        )
        for layer, (before, now) in seconds.items()
        if slower(before, now)
    }


def _weights(layer: torch.nn.Module) -> list[torch.Tensor]:
    """[*, out_features, in_features] each."""
    if isinstance(layer, ProductModule):
        return [weight for product in layer.products for weight in layer.weights(product).values()]
    if not is_experts(layer):
        return [layer.weight]
    weights = [getattr(layer, name) for name in weight_names(layer)]
    return [weight.transpose(1, 2) for weight in weights] if layer.is_transposed else weights


def _weight_bytes(layer: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in _weights(layer))


def _sizes(layer: torch.nn.Module) -> tuple[int, int]:
    """in_features and out_features, of several weights the first one's and the last one's. What a torch.nn.Linear says
    of itself, if its weight does not: uninitialised, None, packed by another library."""
    weights = _weights(layer)
    if isinstance(layer, torch.nn.Linear) and (has_no_weight_yet(layer) or weights[0] is None or weights[0].dim() != 2):
        return layer.in_features, layer.out_features
    return weights[0].shape[-1], weights[-1].shape[-2]


def _inner_features(layer: torch.nn.Module) -> int | None:
    """The inputs of the last of several matmuls."""
    several = len(layer.products) > 1 if isinstance(layer, ProductModule) else is_experts(layer)
    return _weights(layer)[-1].shape[-1] if several else None


def _nothing(
    model: torch.nn.Module,
    found: dict[torch.nn.Module, list[str]],
    why_not: dict[torch.nn.Module, str],
    plan: Plan,
) -> str:
    name = type(model).__name__
    others = other_parameters(model, {each for its in found.values() for each in its})
    if not found:
        none = f"convert: nothing to convert: {name} has no torch.nn.Linear and no layer of quire, by itself or within"
        return "\n".join([none, *others])
    looked_at = [
        LayerReport(tuple(its), *_sizes(layer), str(why_not[layer]), inner_features=_inner_features(layer))
        for layer, its in found.items()
    ]
    remedies = dict.fromkeys(filter(None, map(remedy_of, why_not.values())))
    none = "the linear layer" if len(found) == 1 else f"none of the {len(found)} linear layers"
    does = "does not qualify" if len(found) == 1 else "qualifies"
    follow = "The reason follows" if len(found) == 1 else "The reasons follow"
    head = f"convert: nothing to convert: {none} of {name} {does}. {'. '.join(remedies) or follow}"
    return "\n".join([head, *layer_lines(tuple(looked_at)), *others])


@own_context()
def adopt(layers: list[torch.nn.Module], plan: Plan, made: dict[int, torch.nn.Parameter]) -> None:
    """Makes the layers quire's. made: as for quantize_for_inference."""
    from tqdm import tqdm

    new, experts = [], []
    # A bar appears after a second, where someone watches.
    for layer in tqdm(layers, desc="quire.convert", unit="layer", delay=1, disable=None):
        if isinstance(layer, ProductModule):
            layer.recipe = plan.recipe
            layer.add_input_scales()
        elif is_experts(layer):
            experts.append(StackedExperts.adopt(layer, plan.recipe))
        else:
            new.append(Linear.adopt(layer, plan.recipe))
        if plan.for_inference:
            quantize_for_inference(layer, plan.recipe, made)
    reset_streams([layer.sr_state for layer in new], [layer.take_stream() for layer in new])
    for layer in experts:
        layer.reset_states()
