"""The changes that quire.convert made to a model, and what it left in high precision and why, as values and as a
table."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch

from quire.checks import check_type, counted
from quire.conversion.held import Untied
from quire.nn.product_module import ProductModule
from quire.tensor import QuantizedTensor

_REPORT = "_quire_conversion"
_OF_AUTOCAST = "that of quire.autocast, if there is one"


_NUMBER = re.compile(r"\b\d+\b")


class Reason(str):
    """The words of a report, with what the caller can do. The error of quire.convert says that if all layers are left.

    Attributes:
        remedy: a sentence without its full stop; "" if there is nothing to do, or the words say it.
    """

    remedy: str

    def __new__(cls, words: str, remedy: str = "") -> Self:
        reason = super().__new__(cls, words)
        reason.remedy = remedy
        return reason


def remedy_of(reason: str) -> str:
    """ "" for words alone."""
    return reason.remedy if isinstance(reason, Reason) else ""


@dataclass(frozen=True)
class LayerReport:
    """The result of the conversion for one layer: a torch.nn.Linear or, for inference, any layer of quire.

    Attributes:
        names: all names of the layer in the model; "" is the model itself.
        in_features: the number of features of x.
        out_features: the number of features of y.
        why_not: "" if the layer is now a layer of quire, else the reason.
        recipe: the text of the layer's own recipe, None without one.
        weight_bytes: the bytes of its weights before and after a conversion for inference.
        seconds: the time of one call before and after, if measured.
        kept: why this call did not change a layer that was a layer of quire before; "" if it changed the layer.
        computed: what computed its weight in every call and was removed, such as "weight by prune"; "" if nothing did.
        for_inference: whether its weights are codes for inference, which are not trained.
        inner_features: the number of features between its matmuls, None for a layer with one matmul.
    """

    names: tuple[str, ...]
    in_features: int
    out_features: int
    why_not: str = ""
    recipe: str | None = None
    weight_bytes: tuple[int, int] | None = None
    seconds: tuple[float, float] | None = None
    kept: str = ""
    computed: str = ""
    for_inference: bool = False
    inner_features: int | None = None

    @property
    def converted(self) -> bool:
        return not self.why_not


@dataclass(frozen=True)
class ParameterReport:
    """A parameter that a matmul may read and that stays in high precision: the weight of a torch.nn.Linear, or a
    floating-point parameter with at least two dimensions of a module that is not an embedding.

    Attributes:
        names: all names of the parameter in the model.
        shape: its shape.
        share: its number of elements, relative to the elements of all such parameters, including converted ones.
        owner: the class of the module that has the parameter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    share: float
    owner: str


@dataclass(frozen=True)
class ConversionReport:
    """The changes that the last quire.convert made to a model. str() gives a table. The table has one line for all
    layers whose names differ only in numbers, with * for each number, or the numbers if two lines have such names.

    Attributes:
        model: the class of the model.
        recipe: the text of the recipe of this conversion, None without one. Each layer has its own in `layers`.
        layers: every torch.nn.Linear, in the model's order, including those that an earlier call converted.
        notes: what to know before the model runs.
        parameters: every parameter that a matmul may read and that stays in high precision, also of layers that were
            not converted.
        tokens: the rows of x in the calls that were timed, None without timing.
        nbytes: the bytes of all tensors that the model holds, before and after this conversion: parameters, buffers,
            gradients and the state of layers; memory that several share counts once.
        untied: of parameters that shared memory before and no longer do, a named tuple each of the names that are codes
            now (quantized), the names that keep their values (others), and the bytes of the codes (nbytes).
        method: of quire.quantize_model, which made the codes; "rtn" rounds to nearest.
    """

    model: str
    recipe: str | None
    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()
    parameters: tuple[ParameterReport, ...] = ()
    tokens: int | None = None
    nbytes: tuple[int, int] | None = None
    untied: tuple[Untied, ...] = ()
    method: str = "rtn"

    @property
    def converted(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.converted)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if not layer.converted)

    def __str__(self) -> str:
        run = self.recipe or _OF_AUTOCAST
        verb = "is" if len(self.layers) == 1 else "are"
        uses = [layer.for_inference for layer in self.converted]
        mixed = len(set(uses)) > 1
        of_each = f", {sum(uses)} for inference and {len(uses) - sum(uses)} for training" if mixed else ""
        again = any(layer.kept for layer in self.converted)
        lines = [
            f"{self.model}: {len(uses)} of {counted(len(self.layers), 'linear layer')} {verb} quire's{of_each}",
            f"recipe: {run}" + (", of the last conversion" if again else ""),
        ]
        if self.nbytes is not None and any(layer.weight_bytes is not None for layer in self.converted):
            before, now = map(megabytes, self.nbytes)
            since = "before the last conversion" if again else "before"
            lines.append(f"memory: {before} {since}, {now} now, of all that the model holds")
        if self.tokens is not None:
            lines.append(f"times: of one call of a layer with {counted(self.tokens, 'row')}, before and now")
        lines += [*layer_lines(self.layers, self.recipe, mixed), *_parameter_lines(self.parameters)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


def layer_lines(layers: tuple[LayerReport, ...], recipe: str | None = None, mixed: bool = False) -> Iterator[str]:
    """One line for all layers with the same values; layers that were not converted are last. recipe: not repeated in
    each line. mixed: each line says whether its layers are for inference or for training."""
    groups: dict[tuple[str, ...], list[LayerReport]] = {}
    for layer in sorted(layers, key=lambda layer: not layer.converted):
        groups.setdefault(_kind(layer, recipe, mixed), []).append(layer)
    names = _line_names([layer.names for layer in alike] for alike in groups.values())
    width = max(map(len, names), default=0)
    for name, (_, *said), alike in zip(names, groups, groups.values(), strict=True):
        if len(alike) > 1:
            said[0] += f" x {len(alike)}"
            said[1] += " each" if said[1] else ""
        yield f"  {name:<{width}}  {'  '.join(filter(None, said))}"


def _kind(layer: LayerReport, recipe: str | None, mixed: bool) -> tuple[str, ...]:
    """What layers of one line have in common: the pattern of their names, and what the line says of them."""
    before_and_now = (
        " -> ".join(map(megabytes, layer.weight_bytes)) if layer.weight_bytes is not None else "",
        " -> ".join(map(milliseconds, layer.seconds)) if layer.seconds is not None else "",
    )
    own = f"recipe: {layer.recipe or _OF_AUTOCAST}" if layer.converted and layer.recipe != recipe else ""
    use = ("for inference" if layer.for_inference else "for training") if mixed and layer.converted else ""
    kept = f"unchanged by the last conversion: {layer.kept}" if own and layer.kept else ""
    left = f"left: {layer.why_not}" if layer.why_not else ""
    fixed = f"no longer computed: {layer.computed}" if layer.computed else ""
    inner = "" if layer.inner_features is None else f"{layer.inner_features} -> "
    return (
        _pattern(layer.names),
        f"{layer.in_features} -> {inner}{layer.out_features}",
        *before_and_now,
        use,
        own,
        kept,
        fixed,
        left,
    )


def _pattern(names: tuple[str, ...]) -> str:
    return _NUMBER.sub("*", " = ".join(names))


def _line_names(groups: Iterable[list[tuple[str, ...]]]) -> list[str]:
    """What each line calls its layers. groups: the names of the layers of each line, which differ in numbers only. A
    pattern that two lines would have gets the numbers."""
    groups = list(groups)
    patterns = collections.Counter(_pattern(each[0]) for each in groups)
    return [
        (_numbered(each) if len(each) == 1 or patterns[_pattern(each[0])] > 1 else _pattern(each[0])) or "(the model)"
        for each in groups
    ]


def _numbered(each: list[tuple[str, ...]]) -> str:
    """Names with all their numbers: "blocks.{0,5}.up", "blocks.{1-4}.up"."""
    joined = [" = ".join(names) for names in each]
    numbers = iter(zip(*[map(int, _NUMBER.findall(name)) for name in joined], strict=True))
    return _NUMBER.sub(lambda _: _set(sorted(set(next(numbers)))), joined[0])


def _set(numbers: list[int]) -> str:
    first, last, dots = numbers[0], numbers[-1], len(numbers) > 2
    if len(numbers) == 1:
        return str(first)
    return f"{{{first}-{last}}}" if dots and last - first == len(numbers) - 1 else f"{{{','.join(map(str, numbers))}}}"


def _parameter_lines(parameters: tuple[ParameterReport, ...]) -> Iterator[str]:
    if not parameters:
        return
    yield f"in high precision, {percent(sum(p.share for p in parameters))} of the weights that matmuls may read:"
    groups: dict[tuple[str, tuple[int, ...], str], list[ParameterReport]] = {}
    for p in parameters:
        groups.setdefault((_pattern(p.names), p.shape, p.owner), []).append(p)
    names = _line_names([p.names for p in alike] for alike in groups.values())
    width = max(map(len, names))
    for name, ((_, shape, owner), alike) in zip(names, groups.items(), strict=True):
        times = f" x {len(alike)}" if len(alike) > 1 else ""
        yield f"  {name:<{width}}  {list(shape)}{times} of {owner}: {percent(sum(p.share for p in alike))}"


def other_parameters(model: torch.nn.Module, layers: set[str]) -> list[str]:
    """The lines about parameters in high precision that a matmul may read, if some are of no layer of these names."""
    left = left_parameters(model)
    own = all(name.rpartition(".")[0] in layers for parameter in left for name in parameter.names)
    return [] if own else list(_parameter_lines(left))


def untied_notes(untied: tuple[Untied, ...]) -> Iterator[str]:
    """What to know of parameters that no longer share memory, of those with numbers in their names once."""
    seen = set()
    for one in untied:
        names = _pattern(one.quantized), _pattern(one.others)
        if names in seen:
            continue
        seen.add(names)
        codes, size = " and ".join(one.quantized), megabytes(one.nbytes)
        if one.others:
            yield (
                f"{codes} shared memory with {' and '.join(one.others)}, and has codes of its own now ({size}), while "
                "the other keeps its values; to keep them tied, leave the layer out by filter="
            )
        else:
            yield f"{codes} shared memory, and have codes of their own now ({size})"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def keep_report(model: torch.nn.Module, report: ConversionReport) -> None:
    """A method of an earlier call stays: refit() must know that some codes were made by it."""
    earlier = vars(model).get(_REPORT)
    if report.method == "rtn" and earlier is not None:
        report = dataclasses.replace(report, method=earlier.method)
    vars(model)[_REPORT] = report


def conversion_report(model: torch.nn.Module) -> ConversionReport:
    """The report of the last quire.convert of this model, or of the model that torch.compile or DistributedDataParallel
    wraps. Deep copies and pickles of a model keep the report. A note counts layers that have lost their own recipe
    since, as after quire.dequantize_weights.

    Args:
        model: a converted model, or one that torch.compile or DistributedDataParallel wraps around it.

    Returns:
        A ConversionReport.

    Raises:
        ValueError: for a model that was not converted.
        TypeError: for what is no torch.nn.Module.
    """
    check_type("conversion_report", torch.nn.Module, model=model)
    for wrapped in ("_orig_mod", "module"):
        if _REPORT not in vars(model) and isinstance(inner := getattr(model, wrapped, None), torch.nn.Module):
            model = inner
    if _REPORT not in vars(model):
        raise ValueError(
            f"conversion_report: this {type(model).__name__} was not converted; pass what quire.convert returned. "
            "Of a model that was built of quire's layers, or that from_pretrained has loaded, print(model) shows the "
            "recipe of each layer"
        )
    return _without_decoded(vars(model)[_REPORT], model)


def _without_decoded(report: ConversionReport, model: torch.nn.Module) -> ConversionReport:
    """The report, without what it says of codes that the model no longer has."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = tuple(_as_it_is(layer, modules.get(layer.names[0])) for layer in report.layers)
    changed = sum(now is not layer for now, layer in zip(layers, report.layers, strict=True))
    if not changed:
        return report
    have = "has" if changed == 1 else "have"
    note = f"{counted(changed, 'layer')} {have} no recipe any more, as after quire.dequantize_weights"
    left = report.recipe if any(layer.recipe == report.recipe for layer in layers) else None
    timed = report.tokens if any(layer.seconds is not None for layer in layers) else None
    notes = (*report.notes, note)
    if not any(layer.for_inference for layer in layers):
        notes = tuple(each for each in notes if each not in set(untied_notes(report.untied)))
    return dataclasses.replace(report, recipe=left, layers=layers, notes=notes, tokens=timed, nbytes=None)


def _as_it_is(layer: LayerReport, module: torch.nn.Module | None) -> LayerReport:
    """layer, or if its module has lost the recipe of its own, what is still so."""
    if layer.recipe is None or not isinstance(module, ProductModule) or module.recipe is not None:
        return layer
    codes = any(isinstance(parameter, QuantizedTensor) for parameter in module.parameters(recurse=False))
    return dataclasses.replace(
        layer, recipe=None, weight_bytes=None, seconds=None, kept="", for_inference=codes and layer.for_inference
    )


# --- what stays in high precision


#: The report has a note if a larger share of a model stays in high precision.
_MOST = 0.5


def notes_on_fast_paths(model: torch.nn.Module, chosen: list[torch.nn.Module]) -> Iterator[str]:
    """Notes about PyTorch's fast paths, which do not call converted layers."""
    past = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.TransformerEncoderLayer)
        and not set(chosen).isdisjoint((module.linear1, module.linear2))
    ]
    if past and torch.backends.mha.get_fastpath_enabled():
        yield (
            "in inference torch.nn.TransformerEncoderLayer may compute past its layers, in high precision; "
            "torch.backends.mha.set_fastpath_enabled(False) makes it call them"
        )


def left_parameters(model: torch.nn.Module) -> tuple[ParameterReport, ...]:
    """The ParameterReports of a model, in its order. Layers of quire are not among them: they quantize their
    weights."""
    names: dict[torch.Tensor, list[str]] = {}
    owners: dict[torch.Tensor, list[torch.nn.Module]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        owner = _owner(model, prefix, module)
        for name, p in module.named_parameters(recurse=False):
            if torch.nn.parameter.is_lazy(p) or not p.is_floating_point() or p.dim() < 2:
                continue
            if isinstance(module, torch.nn.Linear) or min(p.shape[-2:]) > 1:
                names.setdefault(p, []).append(f"{prefix}.{name}" if prefix else name)
                owners.setdefault(p, []).append(owner)
    lookups = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    read = [p for p, modules in owners.items() if not all([isinstance(m, lookups) for m in modules])]
    total = sum(p.numel() for p in read)
    left = []
    for p in read:
        modules = [m for m in owners[p] if not isinstance(m, lookups)]
        if not all([isinstance(m, ProductModule) for m in modules]):
            left.append(ParameterReport(tuple(names[p]), tuple(p.shape), p.numel() / total, type(modules[0]).__name__))
    return tuple(left)


def _owner(model: torch.nn.Module, prefix: str, module: torch.nn.Module) -> torch.nn.Module:
    """The module whose weight is computed from the module's parameters: that of a parametrization, or the module."""
    outer, found, _ = f".{prefix}.".partition(".parametrizations.")
    return model.get_submodule(outer.strip(".")) if found else module


def left_notes(left: tuple[ParameterReport, ...], filtered: set[str]) -> Iterator[str]:
    """filtered: names of layers that the caller's filter leaves, about which the caller knows."""
    left = tuple(p for p in left if not any(name.rpartition(".")[0] in filtered for name in p.names))
    share = sum(p.share for p in left)
    if share >= _MOST:
        largest = max(left, key=lambda p: p.share)
        yield (
            f"{percent(share)} of the weights that matmuls may read stay in high precision, the most in "
            f"{largest.names[0]} {list(largest.shape)} of {largest.owner}"
        )
