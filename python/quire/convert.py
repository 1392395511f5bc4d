"""The torch.nn.Linear layers of a model become quire.Linear; and a report of which did, why the others did not, and
which other parameters stay in high precision."""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from quire.nn.linear import Linear, own_recipe
from quire.nn.product_module import ProductModule
from quire.nn.random_state import reset_streams
from quire.recipe import Recipe
from quire.tensor import DTYPES

#: Layers with fewer inputs or outputs are left alone.
MIN_FEATURES = 256

_REPORT = "_quire_conversion"
#: A model of which more stays in high precision gets a note.
_MOST = 0.5


@dataclass(frozen=True)
class LayerReport:
    """What became of one torch.nn.Linear.

    names: all that it has in the model; "" is the model itself. why_not: "" if it is a quire.Linear now.
    """

    names: tuple[str, ...]
    in_features: int
    out_features: int
    why_not: str = ""

    @property
    def converted(self) -> bool:
        return not self.why_not


@dataclass(frozen=True)
class ParameterReport:
    """A parameter that stays in high precision though a product may read it: the weight of a torch.nn.Linear, or a
    floating-point one of at least two dimensions that a module other than an embedding has.

    names: all that it has in the model. share: its part of the elements of all such parameters, converted ones too.
    owner: the class of the module that has it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    share: float
    owner: str


@dataclass(frozen=True)
class ConversionReport:
    """What quire.convert did to a model. str() is a table, in which layers that differ in numbers of their names only
    are one line.

    model: its class. recipe: the text of the layers' own one, None without. layers: every torch.nn.Linear, in the
    model's order. parameters: every parameter that a product may read and that stays in high precision, those of layers
    that were left too. notes: what to know before the model runs.
    """

    model: str
    recipe: str | None
    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()
    parameters: tuple[ParameterReport, ...] = ()

    @property
    def converted(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.converted)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if not layer.converted)

    def __str__(self) -> str:
        run = "that of quire.autocast, if there is one" if self.recipe is None else self.recipe
        head = f"{self.model}: {len(self.converted)} of {len(self.layers)} torch.nn.Linear are quire.Linear"
        lines = [head, f"recipe: {run}", *_lines(self.layers), *_parameter_lines(self.parameters)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


def _lines(layers: tuple[LayerReport, ...]) -> Iterator[str]:
    """Those left alone last."""
    groups: dict[tuple, int] = {}
    for layer in sorted(layers, key=lambda layer: not layer.converted):
        name = re.sub(r"\b\d+\b", "*", " = ".join(layer.names)) or "(the model)"
        key = (name, f"{layer.in_features} -> {layer.out_features}", layer.why_not)
        groups[key] = groups.get(key, 0) + 1
    width = max((len(name) for name, _, _ in groups), default=0)
    for (name, size, why_not), count in groups.items():
        times = f" x {count}" if count > 1 else ""
        yield f"  {name:<{width}}  {size}{times}" + (f"  left: {why_not}" if why_not else "")


def _parameter_lines(parameters: tuple[ParameterReport, ...]) -> Iterator[str]:
    if not parameters:
        return
    yield f"in high precision, {_percent(sum(p.share for p in parameters))} of the weights that products may read:"
    groups: dict[tuple[str, tuple[int, ...], str], list[float]] = {}
    for p in parameters:
        key = (re.sub(r"\b\d+\b", "*", " = ".join(p.names)), p.shape, p.owner)
        groups.setdefault(key, []).append(p.share)
    width = max(len(name) for name, _, _ in groups)
    for (name, shape, owner), shares in groups.items():
        times = f" x {len(shares)}" if len(shares) > 1 else ""
        yield f"  {name:<{width}}  {list(shape)}{times} of {owner}: {_percent(sum(shares))}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def convert(
    model: torch.nn.Module,
    recipe: Recipe | str | None = None,
    filter: Callable[[torch.nn.Module, str], bool] | None = None,
    *,
    min_features: int = MIN_FEATURES,
) -> torch.nn.Module:
    """Makes the model's torch.nn.Linear layers quire.Linear, in place, and returns the model.

    recipe: the layers' own, a recipe, its name or its text: they run under it wherever no quire.autocast is active,
        while within one that decides, also if it is disabled. None gives them none. Delayed scaling has to come from
        quire.autocast.
    filter: (module, its name in the model) -> whether to convert. Asked for every torch.nn.Linear; of a module with
        several names, for each, and all have to agree. None converts all.
    min_features: layers with fewer inputs or outputs stay as they are. Quantizing x costs a step per element of x,
        which out_features multiplications have to earn; and a call costs some microseconds more than torch's, whatever
        the sizes. Below 256 no recipe gained when it was measured, above NVFP4 with some tens of tokens, and from 1024
        on all do (docs/benchmarks.md). There is no other rule: no size is padded or refused, odd ones are as quick.

    A layer stays the same object, with its parameters, hooks, flags and names, so that optimizers, ties and whatever
    else holds a reference go on working, and state_dict stays as it was. The model itself may be the layer. On the meta
    device layers get their random state when they leave it, as always (quire.Linear). A quire.Linear that the filter
    takes gets the recipe. Left alone, with a reason in quire.conversion_report(model), are subclasses of
    torch.nn.Linear, whose forward may be another, layers whose forward was replaced, and dtypes other than float32,
    float16 and bfloat16.

    Raises ValueError if nothing is to be converted, saying what was looked at; TypeError for arguments of a wrong kind.
    The model is then as it was.
    """
    _check(model, filter)
    recipe = own_recipe("convert", recipe)
    found = _linears(model)
    reports = []
    for layer, names in found.items():
        why_not = _why_not(layer, recipe, min_features)
        if filter is not None and not all([filter(layer, name) for name in names]):
            why_not = "the filter says so"
        reports.append(LayerReport(tuple(names), layer.in_features, layer.out_features, why_not))
    text = None if recipe is None else recipe.linear_spec()
    left = _left(model, {layer for layer, its in zip(found, reports, strict=True) if its.converted})
    notes = (*_notes(model, found, reports), *_left_notes(left))
    report = ConversionReport(type(model).__name__, text, tuple(reports), notes, left)
    chosen = [layer for layer, its in zip(found, reports, strict=True) if its.converted]
    if not chosen:
        raise ValueError(_nothing(report))
    _adopt(chosen, recipe)
    for note in report.notes:
        warnings.warn(f"quire.convert: {note}", stacklevel=2)
    vars(model)[_REPORT] = report
    return model


def conversion_report(model: torch.nn.Module) -> ConversionReport:
    """What the last quire.convert of this model, or of what torch.compile or DistributedDataParallel wraps, did. A deep
    copy and a pickle of a model keep it. Raises ValueError for a model that was not converted."""
    for wrapped in ("_orig_mod", "module"):
        if _REPORT not in vars(model) and isinstance(inner := getattr(model, wrapped, None), torch.nn.Module):
            model = inner
    if _REPORT not in vars(model):
        raise ValueError(
            f"conversion_report: this {type(model).__name__} was not converted; pass what quire.convert returned"
        )
    return vars(model)[_REPORT]


def _check(model: object, filter: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    if filter is not None and not callable(filter):
        raise TypeError(
            f"convert: filter must be a function of (module, name), got {filter!r}; "
            'to choose by name: lambda module, name: "lm_head" not in name'
        )


def _linears(model: torch.nn.Module) -> dict[torch.nn.Linear, list[str]]:
    """Every torch.nn.Linear, subclasses included, with all of its names."""
    found: dict[torch.nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear):
            found.setdefault(module, []).append(name)
    return found


def _why_not(layer: torch.nn.Linear, recipe: Recipe | None, min_features: int) -> str:
    """Why the layer is not converted, filter apart; "" if it is."""
    if type(layer) is Linear:
        return "it is a quire.Linear already" if recipe is None else ""
    if type(layer) is not torch.nn.Linear:
        return f"{type(layer).__name__} is a subclass of torch.nn.Linear, and may compute something else"
    if "forward" in vars(layer):
        return "its forward was replaced, and would not run quire.Linear's"
    if layer.weight.dtype not in DTYPES:
        return f"its weight is {str(layer.weight.dtype).removeprefix('torch.')}, not float32, float16 or bfloat16"
    name, least = min(("in_features", layer.in_features), ("out_features", layer.out_features), key=lambda it: it[1])
    return f"too small to gain, {name} < {min_features}" if least < min_features else ""


def _notes(
    model: torch.nn.Module, found: dict[torch.nn.Linear, list[str]], reports: list[LayerReport]
) -> Iterator[str]:
    converted = {layer for layer, its in zip(found, reports, strict=True) if its.converted}
    past = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.TransformerEncoderLayer)
        and not converted.isdisjoint((module.linear1, module.linear2))
    ]
    if past and torch.backends.mha.get_fastpath_enabled():
        yield (
            "in inference torch.nn.TransformerEncoderLayer may compute past its layers, in high precision; "
            "torch.backends.mha.set_fastpath_enabled(False) makes it call them"
        )


def _left(model: torch.nn.Module, converted: set[torch.nn.Linear]) -> tuple[ParameterReport, ...]:
    """What ParameterReport describes, in the model's order. Layers of quire quantize their weights themselves."""
    names: dict[torch.Tensor, list[str]] = {}
    owners: dict[torch.Tensor, list[torch.nn.Module]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, p in module.named_parameters(recurse=False):
            if torch.nn.parameter.is_lazy(p) or not p.is_floating_point() or p.dim() < 2:
                continue
            if isinstance(module, torch.nn.Linear) or min(p.shape[-2:]) > 1:
                names.setdefault(p, []).append(f"{prefix}.{name}" if prefix else name)
                owners.setdefault(p, []).append(module)
    lookups = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    read = [p for p, modules in owners.items() if not all([isinstance(m, lookups) for m in modules])]
    total = sum(p.numel() for p in read)
    left = []
    for p in read:
        modules = [m for m in owners[p] if not isinstance(m, lookups)]
        if not all([m in converted or isinstance(m, ProductModule) for m in modules]):
            left.append(ParameterReport(tuple(names[p]), tuple(p.shape), p.numel() / total, type(modules[0]).__name__))
    return tuple(left)


def _left_notes(left: tuple[ParameterReport, ...]) -> Iterator[str]:
    share = sum(p.share for p in left)
    if share >= _MOST:
        largest = max(left, key=lambda p: p.share)
        yield (
            f"{_percent(share)} of the weights that products may read stay in high precision, the most in "
            f"{largest.names[0]} {list(largest.shape)} of {largest.owner}; quire.conversion_report(model) lists them"
        )


def _nothing(report: ConversionReport) -> str:
    if not report.layers:
        return f"convert: nothing to convert: {report.model} has no torch.nn.Linear, by itself or within"
    looked_at = "\n".join(_lines(report.layers))
    return (
        f"convert: nothing to convert: none of the {len(report.layers)} torch.nn.Linear of {report.model} qualifies. "
        f"Pass another filter or min_features\n{looked_at}"
    )


def _adopt(layers: list[torch.nn.Linear], recipe: Recipe | None) -> None:
    from tqdm import tqdm

    new = []
    # A bar appears after a second, where someone watches.
    for layer in tqdm(layers, desc="quire.convert", unit="layer", delay=1, disable=None):
        if type(layer) is Linear:
            layer.recipe = recipe
        else:
            new.append(Linear.adopt(layer, recipe))
    reset_streams([layer.sr_state for layer in new])
