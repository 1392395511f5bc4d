"""What quire.convert did to a model, as values and as a table."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_REPORT = "_quire_conversion"


@dataclass(frozen=True)
class LayerReport:
    """What became of one layer of a model: of a torch.nn.Linear, or for inference of any layer of quire.

    names: all that it has in the model; "" is the model itself. why_not: "" if it is a layer of quire now.
    recipe: the text of its own one, None without.
    weight_bytes: of its weights, before and now. seconds: of one call, before and now, where they were measured.
    """

    names: tuple[str, ...]
    in_features: int
    out_features: int
    why_not: str = ""
    recipe: str | None = None
    weight_bytes: tuple[int, int] | None = None
    seconds: tuple[float, float] | None = None

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
    """What quire.convert did to a model. str() is a table, in which layers whose names differ in numbers only are one
    line with the first name and the last.

    model: its class. recipe: the text of the layers' own one, None without. layers: every torch.nn.Linear, in the
    model's order, those that an earlier call converted too. parameters: every parameter that a product may read and
    that stays in high precision, those of layers that were left too. notes: what to know before the model runs.
    tokens: rows of x in the calls that were timed, None if none were.
    """

    model: str
    recipe: str | None
    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()
    parameters: tuple[ParameterReport, ...] = ()
    tokens: int | None = None

    @property
    def converted(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.converted)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if not layer.converted)

    def __str__(self) -> str:
        run = "that of quire.autocast, if there is one" if self.recipe is None else self.recipe
        lines = [
            f"{self.model}: {len(self.converted)} of {len(self.layers)} linear layers are quire's",
            f"recipe: {run}",
        ]
        sizes = [layer.weight_bytes for layer in self.converted if layer.weight_bytes is not None]
        if sizes:
            before, now = (sum(size) for size in zip(*sizes, strict=True))
            lines.append(f"weights: {megabytes(before)} before, {megabytes(now)} now")
        if self.tokens is not None:
            lines.append(f"times: of one call of a layer with {self.tokens} rows, before and now")
        lines += [*layer_lines(self.layers, self.recipe), *_parameter_lines(self.parameters)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


def layer_lines(layers: tuple[LayerReport, ...], recipe: str | None = None) -> Iterator[str]:
    """A line for layers alike, those left alone last. recipe: the one that need not be said of each."""
    groups: dict[tuple[str, ...], list[LayerReport]] = {}
    for layer in sorted(layers, key=lambda layer: not layer.converted):
        groups.setdefault(_kind(layer, recipe), []).append(layer)
    names = [_names([layer.names for layer in alike]) for alike in groups.values()]
    width = max(map(len, names), default=0)
    for name, (_, *said), alike in zip(names, groups, groups.values(), strict=True):
        said[0] += f" x {len(alike)}" if len(alike) > 1 else ""
        yield f"  {name:<{width}}  {'  '.join(filter(None, said))}"


def _kind(layer: LayerReport, recipe: str | None) -> tuple[str, ...]:
    """What layers of one line have in common: the pattern of their names, and what the line says of them."""
    before_and_now = (
        " -> ".join(map(megabytes, layer.weight_bytes)) if layer.weight_bytes is not None else "",
        " -> ".join(map(milliseconds, layer.seconds)) if layer.seconds is not None else "",
    )
    own = f"recipe: {layer.recipe}" if layer.converted and layer.recipe != recipe else ""
    left = f"left: {layer.why_not}" if layer.why_not else ""
    return _pattern(layer.names), f"{layer.in_features} -> {layer.out_features}", *before_and_now, own, left


def _pattern(names: tuple[str, ...]) -> str:
    return re.sub(r"\b\d+\b", "*", " = ".join(names))


def _names(each: list[tuple[str, ...]]) -> str:
    """The first and the last of names that differ in numbers."""
    first, last = (" = ".join(names) or "(the model)" for names in (each[0], each[-1]))
    return first if len(each) == 1 else f"{first} ... {last}"


def _parameter_lines(parameters: tuple[ParameterReport, ...]) -> Iterator[str]:
    if not parameters:
        return
    yield f"in high precision, {percent(sum(p.share for p in parameters))} of the weights that products may read:"
    groups: dict[tuple[str, tuple[int, ...], str], list[ParameterReport]] = {}
    for p in parameters:
        groups.setdefault((_pattern(p.names), p.shape, p.owner), []).append(p)
    names = [_names([p.names for p in alike]) for alike in groups.values()]
    width = max(map(len, names))
    for name, ((_, shape, owner), alike) in zip(names, groups.items(), strict=True):
        times = f" x {len(alike)}" if len(alike) > 1 else ""
        yield f"  {name:<{width}}  {list(shape)}{times} of {owner}: {percent(sum(p.share for p in alike))}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def keep_report(model: torch.nn.Module, report: ConversionReport) -> None:
    vars(model)[_REPORT] = report


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
