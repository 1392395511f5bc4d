"""Checkpoints without a model: what one is by its headers (inspect), whether every rule holds, values included
(verify), whether each of its layers computes (run), and how two differ (diff)."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.checks import check_type, check_type_or_none, counted
from quire.conversion.timing import check_tokens
from quire.io.container import CheckpointError, Entry, some
from quire.io.container import Container as FileContainer
from quire.io.dialect import OF_CACHES, OF_FILES, Dialect, check_consumed, check_unscaled, contents, unscaled
from quire.io.dialects import dialect_named, dialect_of
from quire.io.dialects.native import weight_of, without_layers
from quire.io.into_model import load_layer
from quire.io.layout import Group, StoredWeight, check_zero_points, consumed, missing_inputs
from quire.io.reading import Checkpoint, opened, read
from quire.loading.float_mode import subnormals_kept
from quire.nn.input_scale import of_same_amax
from quire.nn.own_context import running
from quire.nn.product_module import ProductModule

#: Values that differ by more units in the last place are others, not the same with other roundings.
_MOST_ULP = 4096
#: The rows of a table of layers.
_SHOWN = 10
#: After so many broken rules of headers no further ones are looked for.
_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Stored:
    """A quantized layer. layout: its name in the dialect. spec: of the weight. inputs: the spec of its inputs. nbytes:
    the bytes of all of its tensors."""

    name: str
    layout: str
    spec: str
    inputs: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The result of inspect(). str() gives a table.

    Attributes:
        path: as it was given.
        dialect: its name; None if no layer is quantized.
        layers: the quantized layers.
        plain: name -> dtype and shape as text, for tensors that are not quantized, and for those of layers that break a
            rule.
        caches: the names of scales of key-value caches.
        files: the number of files.
        nbytes: the size of the files.
        problems: the broken rules, in words.
    """

    path: str
    dialect: str | None
    layers: tuple[Stored, ...]
    plain: dict[str, str]
    caches: tuple[str, ...]
    files: int
    nbytes: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        quantized = sum(layer.nbytes for layer in self.layers)
        head = (
            f"{self.path}\n{self.dialect or 'nothing quantized'}, {counted(self.files, 'file')}, {_size(self.nbytes)}; "
            f"{contents(len(self.layers), (*self.plain, *self.caches), _size(quantized))}"
        )
        rows = [("layers", "count", "shape", "stored as", "inputs", "bytes")]
        kinds: dict[tuple[str, ...], list[Stored]] = {}
        for layer in self.layers:
            key = (_pattern(layer.name), layer.layout, layer.spec, layer.inputs, str(list(layer.shape)))
            kinds.setdefault(key, []).append(layer)
        for (name, layout, spec, inputs, shape), layers in kinds.items():
            stored = spec if f"spec={spec}" in layout else f"{layout} ({spec})"
            rows.append((name, str(len(layers)), shape, stored, inputs, _size(sum(one.nbytes for one in layers))))
        plain: dict[tuple[str, str], int] = {}
        for name, what in self.plain.items():
            plain[_pattern(name), what] = plain.get((_pattern(name), what), 0) + 1
        rows += [(name, str(count), what, "", "", "") for (name, what), count in plain.items()]
        return "\n".join([head, *table(rows), *self._legend(), *(f"problem: {it}" for it in self.problems)])

    def _legend(self) -> list[str]:
        """A line for each name under "stored as" that is not a spec."""
        meaning = getattr(None if self.dialect is None else dialect_named(self.dialect), "meaning", lambda layout: "")
        names = dict.fromkeys(layer.layout for layer in self.layers)
        return [f"stored as {name}: {words}" for name in names if (words := meaning(name))]

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        layers = [{**vars(layer), "shape": list(layer.shape)} for layer in self.layers]
        return {**vars(self), "layers": layers, "caches": list(self.caches), "problems": list(self.problems)}


def inspect(path: str | Path) -> Inspection:
    """Describes a checkpoint from its headers, without reading tensors: the dialect, the layers and broken rules.

    Args:
        path: as for read().

    Returns:
        An Inspection.

    Raises:
        CheckpointError: only if there are no readable headers; broken rules are listed in the result.
        TypeError: for another path.
    """
    check_type("quire.io.inspect", str | Path, path=path)
    return _inspected(path, opened(path))[0]


def _inspected(path: str | Path, container: FileContainer) -> tuple[Inspection, FileContainer | None]:
    """The Inspection, and the container with the header of the layers whose headers break no rule; None if a rule of no
    single layer is broken."""
    header, dialect = container.header, dialect_of(container)
    sound, groups, problems = container, [], []
    while sound is not None and len(problems) < _MOST_PROBLEMS:
        try:
            groups = _groups(dialect, sound)
            break
        except CheckpointError as error:
            problems.append(str(error))
            sound = _without(sound, error.tensor)
    if len(problems) == _MOST_PROBLEMS:
        sound = None
    problems += [f"{name}: the static scale of an input is missing" for name in missing_inputs(groups)]
    misfits = ((group.name, group.layout.misfit(group.shape)) for group in groups)
    problems += [f"{name}: {rule}, which only quire reads" for name, rule in misfits if rule]
    used = consumed(groups)
    caches = tuple(name for name in header if OF_CACHES.search(name) and name not in used)
    faulty = set() if sound is None else header.keys() - sound.header.keys()
    plain = {
        name: f"{entry}{' of a layer that breaks a rule' * (name in faulty)}"
        for name, entry in header.items()
        if name not in used and name not in caches
    }
    layers = tuple(_stored(group, header) for group in groups)
    files = {entry.file for entry in header.values()}
    total = sum(entry.nbytes for entry in header.values())
    name = None if dialect is None else dialect.name
    return Inspection(str(path), name, layers, plain, caches, len(files), total, tuple(problems)), sound


def _groups(dialect: Dialect | None, container: FileContainer) -> list[Group]:
    """The quantized layers. Raises CheckpointError for the first broken rule of headers."""
    header = container.header
    groups = [] if dialect is None else dialect.groups(header, container.descriptions)
    check_consumed(groups, header)
    check_unscaled(unscaled(groups, header), header)
    check_zero_points(groups, header, container.tensor)
    return groups


def _without(container: FileContainer, name: str | None) -> FileContainer | None:
    """The container without the layer that has the tensor of that name, to look at the others; None if there is none,
    or if the file describes its layers apart from its tensors."""
    stem = _stem(name or "")
    kept = {one: entry for one, entry in container.header.items() if _stem(one) != stem}
    if not stem or len(kept) == len(container.header) or not isinstance(container, FileContainer):
        return None
    found = copy.copy(container)
    found.header = kept
    vars(found).pop("descriptions", None)  # of the whole header
    found.descriptions = without_layers(found.descriptions, lambda layer: _stem(layer) == stem)
    return found


def _stem(name: str) -> str:
    """The layer of a tensor, whatever the dialect calls its buffers."""
    return weight_of(name).rpartition(".")[0]


def _stored(group: Group, header: dict[str, Entry]) -> Stored:
    size = sum(header[name].nbytes for name in group.names.values())
    layout = group.layout
    inputs = layout.static if "input_scale" in group.names else layout.dynamic
    return Stored(group.name, layout.name, layout.spec, inputs, tuple(group.shape), size)


def _pattern(name: str) -> str:
    """A name with its numbers replaced by *, which is the same for all layers of one kind."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|(?<=\.weight)\d+$|(?<=\.bias)\d+$", "*", name)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# --- every rule, values included


@dataclass(frozen=True)
class LayerCheck:
    """A quantized layer. saturated: share of the codes at the largest magnitude. sqnr: signal to quantization noise in
    dB against the original, None without one."""

    name: str
    saturated: float
    sqnr: float | None


@dataclass(frozen=True)
class Verification:
    """The result of verify(). str() gives a table; it is true if there are no problems.

    Attributes:
        inspection: the result of inspect().
        layers: for each quantized layer its name, the share of saturated codes and the signal to noise ratio.
        problems: the broken rules, in words; empty if there are none.
        left_out: the names of the tensors whose values were not checked, because the headers of their layer break a
            rule.
    """

    inspection: Inspection
    layers: tuple[LayerCheck, ...]
    problems: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether nothing was found."""
        return not self.problems

    def __str__(self) -> str:
        worst = sorted(self.layers, key=lambda one: (one.sqnr if one.sqnr is not None else 0, -one.saturated))[:_SHOWN]
        compared = any(one.sqnr is not None for one in self.layers)
        rows = [("layer", "saturated", "SQNR"), *((w.name, f"{w.saturated:.2%}", _decibels(w.sqnr)) for w in worst)]
        rows = rows if compared else [row[:2] for row in rows]
        layers, problems = counted(len(self.layers), "layer"), counted(len(self.problems), "problem")
        lines = [
            f"{self.inspection.path}: {layers} checked, {problems}",
            *(f"problem: {problem}" for problem in self.problems),
        ]
        if self.left_out and not self.layers:
            limit = f"; after {_MOST_PROBLEMS} no further ones are looked for" * (len(self.problems) >= _MOST_PROBLEMS)
            lines.append(f"no values were checked, because of these problems{limit}")
        elif self.left_out:
            lines.append(
                f"not checked, because headers of their layers break a rule: the values of {some(self.left_out)}"
            )
        what = "the smallest SQNR" if compared else "the most saturated codes"
        return "\n".join([*lines, *_shown(len(self.layers), what), *(table(rows) if worst else ())])

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        layers = [vars(layer) for layer in self.layers]
        problems, left_out = list(self.problems), list(self.left_out)
        return {"path": self.inspection.path, "layers": layers, "problems": problems, "left_out": left_out}


def _shown(count: int, what: str) -> list[str]:
    """A line above a table that does not have all layers. what: the table's layers have it."""
    return [f"the {_SHOWN} of {count} layers with {what}:"] if count > _SHOWN else []


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} dB"


@subnormals_kept()
def verify(path: str | Path, like: str | Path | None = None) -> Verification:
    """Checks every rule of a checkpoint: names, dtypes and shapes as inspect() does, and the values of every quantized
    layer. Scales must be finite and not negative; codes and decoded values must not be NaN.

    Broken rules are listed in the result.

    Args:
        path: as for read().
        like: a checkpoint of the same model in high precision. The report then has the signal to noise ratio of each
            layer.

    Returns:
        A Verification.

    Raises:
        CheckpointError: only if a path has no readable checkpoint.
        TypeError: for another path.
    """
    from tqdm import tqdm

    check_type("quire.io.verify", str | Path, path=path)
    check_type_or_none("quire.io.verify", str | Path, like=like)
    container = opened(path)
    found, sound = _inspected(path, container)
    if sound is None:
        return Verification(found, (), found.problems, tuple(container.header))
    checkpoint = Checkpoint(sound, missing_input_scale="dynamic")
    original = None if like is None else read(like, missing_input_scale="dynamic")
    layers, problems = [], list(found.problems)
    # A bar appears after a second, where someone watches.
    for name in tqdm(checkpoint.groups, desc="quire.io.verify", unit="layer", delay=1, disable=None):
        layer, wrong = _check(name, checkpoint, original)
        layers.append(layer)
        problems += [f"{name}: {what}" for what in wrong]
    left_out = tuple(name for name in container.header if name not in sound.header)
    return Verification(found, tuple(layers), tuple(problems), left_out)


def _check(name: str, checkpoint: Checkpoint, original: Checkpoint | None) -> tuple[LayerCheck, list[str]]:
    stored, group, problems = checkpoint[name], checkpoint.groups[name], []
    for role, full in group.names.items():
        if role in ("data", "bias", "rowwise_data", "columnwise_data"):
            continue
        scale = checkpoint.container.tensor(full)
        if role in ("rowwise_scale", "columnwise_scale") and stored.weight.spec.family == "nvfp4":
            scale = scale.view(torch.float8_e4m3fn)
        problems += [f"{full}: {what}" for what in wrong_scales(scale, is_input=role == "input_scale")]
    values = stored.dequantize(torch.float32)
    bad = int((~torch.isfinite(values)).sum())
    problems += [_are(bad, "value", "NaN or infinite")] if bad else []
    sqnr = None
    if original is not None:
        if name not in original or tuple(original[name].shape) != tuple(values.shape):
            problems.append("the original has no weight of this name and shape")
        else:
            true = original[name]
            true = true.dequantize(torch.float32) if isinstance(true, StoredWeight) else true.float()
            noise = (values - true).double().square().sum()
            signal = true.double().square().sum()
            sqnr = float("inf") if noise == 0 else float(10 * torch.log10(signal / noise))
    return LayerCheck(name, saturated(stored), sqnr), problems


def wrong_scales(scale: torch.Tensor, *, is_input: bool) -> list[str]:
    """What is wrong with a scale, in words."""
    # A uint8 scale is an E8M0 exponent; 255 is NaN.
    values = scale.view(torch.float8_e8m0fnu).float() if scale.dtype == torch.uint8 else scale.float()
    found = {
        "NaN": torch.isnan(values),
        "infinite": torch.isinf(values),
        "negative": values < 0,
        "zero": (values == 0) & is_input,
    }
    return [_are(int(which.sum()), "scale", what) for what, which in found.items() if bool(which.any())]


def _are(count: int, what: str, how: str) -> str:
    return f"{counted(count, what)} {'is' if count == 1 else 'are'} {how}"


def saturated(stored: StoredWeight) -> float:
    """The share of codes at the largest magnitude."""
    data = stored.weight.rowwise_data
    if data.numel() == 0:
        return 0.0
    if stored.weight.spec.family in ("nvfp4", "mxfp4"):
        return float((((data & 7) == 7).float().mean() + ((data >> 4 & 7) == 7).float().mean()) / 2)
    return float(((data & 0x7F) == 0x7E).float().mean())


# --- each layer alone


@dataclass(frozen=True)
class LayerRun:
    """A layer that ran. error: the largest difference from the product of the decoded weight with unquantized inputs,
    relative to the largest result. finite: whether all results are."""

    name: str
    recipe: str
    error: float
    finite: bool


@dataclass(frozen=True)
class Run:
    """The result of run(). str() gives a table; it is true if all results are finite.

    Attributes:
        path: as it was given.
        layers: for each layer its name, recipe and error. The error is the largest difference from the matmul of the
            decoded weight with inputs that are not quantized, relative to the largest result.
    """

    path: str
    layers: tuple[LayerRun, ...]

    def __bool__(self) -> bool:
        """Whether all results are finite."""
        return all(layer.finite for layer in self.layers)

    def __str__(self) -> str:
        worst = sorted(self.layers, key=lambda layer: (layer.finite, -layer.error))[:_SHOWN]
        errors = [f"{w.error:.2%}" if w.finite else "not finite" for w in worst]
        rows = [("layer", "recipe", "error"), *((w.name, w.recipe, e) for w, e in zip(worst, errors, strict=True))]
        wrong = sum(not layer.finite for layer in self.layers)
        head = f"{self.path}: {counted(len(self.layers), 'layer')} ran, {wrong} with results that are not finite"
        return "\n".join([head, *_shown(len(self.layers), "the largest error"), *table(rows)])

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"path": self.path, "layers": [vars(layer) for layer in self.layers]}


@running()
def run(path: str | Path, tokens: int = 4) -> Run:
    """Runs each quantized layer alone, with random inputs, under the recipe that load() would give it, outside of every
    autocast of the caller. The inputs have the standard deviation 1. If the file has a static scale for them, their
    largest magnitude is instead the largest one that the scale was made for.

    Args:
        path: as for read().
        tokens: the number of rows of the inputs, at least 1.

    Returns:
        A Run.

    Raises:
        CheckpointError: if no layer is quantized, and the errors of read().
        ValueError: for tokens below 1.
        TypeError: for arguments of a wrong type.
    """
    from tqdm import tqdm

    check_type("quire.io.run", str | Path, path=path)
    check_type("quire.io.run", int, tokens=tokens)
    check_tokens("quire.io.run", tokens)
    checkpoint = read(path, missing_input_scale="dynamic")
    if not checkpoint.groups:
        raise CheckpointError("no layer is quantized", "nothing is to be run", file=checkpoint.container.path)
    found, generator = [], torch.Generator().manual_seed(0)
    # A bar appears after a second, where someone watches.
    for name in tqdm(checkpoint.groups, desc="quire.io.run", unit="layer", delay=1, disable=None):
        stored = checkpoint[name]
        for index in range(stored.shape[0]) if len(stored.shape) == 3 else [None]:
            layer = load_layer(stored, checkpoint.groups[name].layout, index)
            x = torch.randn(tokens, layer.in_features, generator=generator, dtype=torch.float32, device="cpu")
            x = _within_its_scale(x, layer).to(checkpoint.dtype)
            y = layer(x).float()
            true = torch.nn.functional.linear(x.float(), layer.weight.dequantize(torch.float32))
            true = true if layer.bias is None else true + layer.bias.float()
            error = float((y - true).abs().max() / true.abs().max().clamp_min(1e-30))
            full = name if index is None else f"{name}[{index}]"
            found.append(LayerRun(full, layer.recipe.linear_spec(), error, bool(torch.isfinite(y).all())))
    return Run(str(path), tuple(found))


def _within_its_scale(x: torch.Tensor, layer: ProductModule) -> torch.Tensor:
    """x, with the amax of the layer's static scale if there is one. Larger inputs would be clipped."""
    if not layer.recipe.static_input or not x.numel():
        return x
    amax = float(of_same_amax(layer.input_scale, layer.recipe.input_spec, "nvfp4:given"))
    amax = min(amax, torch.finfo(layer.weight.dtype).max)
    return x * (amax / x.abs().max()) if amax > 0 else x


# --- two checkpoints, tensor by tensor: bytes, then values


@dataclass(frozen=True)
class Difference:
    """The result of diff(). str() gives a table; it is false if nothing differs.

    Attributes:
        only_a: names that only the first checkpoint has.
        only_b: names that only the second checkpoint has.
        different: name -> what differs, in words.
        equal_values: names of entries with equal values that are stored in another way: other bytes, or another layout
            or dialect with the same bytes.
        same: the number of entries with equal bytes.
        configs: what differs in the configurations.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    different: dict[str, str]
    equal_values: tuple[str, ...]
    same: int
    configs: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything but the way of storing differs."""
        return bool(self.only_a or self.only_b or self.different)

    def __str__(self) -> str:
        lines = [
            f"{_are(self.same, 'entry', 'the same')}, "
            f"{len(self.equal_values)} with the same values, stored in another way",
        ]
        lines += [f"only in the first: {name}" for name in self.only_a]
        lines += [f"only in the second: {name}" for name in self.only_b]
        lines += [f"{name}: {what}" for name, what in self.different.items()]
        return "\n".join([*lines, *(f"{name} differs" for name in self.configs)])

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}


@subnormals_kept()
def diff(a: str | Path, b: str | Path) -> Difference:
    """Compares two checkpoints, of the same dialect or of two dialects, one entry after another.

    If the bytes of a layer differ, its decoded values are compared in float32, and the result gives the largest
    difference in units in the last place, if it is at most 4096.

    Args:
        a: the path of the first checkpoint, as for read().
        b: the path of the second one.

    Returns:
        A Difference.

    Raises:
        CheckpointError: as read().
        TypeError: for another path.
    """
    check_type("quire.io.diff", str | Path, a=a, b=b)
    one, other = (read(path, missing_input_scale="dynamic") for path in (a, b))
    # A bias belongs to its layer if the layer is quantized. In a checkpoint where the layer is plain it is an entry.
    names = [name for name in one if name in other]
    different, equal, same = {}, [], 0
    for name in names:
        what = _compare(name, one, other)
        if what is None:
            same += 1
        elif what == "":
            equal.append(name)
        else:
            different[name] = what
    only_a = tuple(name for name in one if name not in other and not OF_FILES.search(name))
    only_b = tuple(name for name in other if name not in one and not OF_FILES.search(name))
    configs = one.container.configs.keys() | other.container.configs.keys()
    unlike = tuple(sorted(c for c in configs if one.container.configs.get(c) != other.container.configs.get(c)))
    return Difference(only_a, only_b, different, tuple(equal), same, unlike)


def _compare(name: str, one: Checkpoint, other: Checkpoint) -> str | None:
    """None: the same bytes; "": the same values; else what differs."""
    a, b = one[name], other[name]
    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b)):
            return None
        return _distance(f"{a.dtype} and {b.dtype}", a, b)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _distance("plain and quantized", _values(a), _values(b))
    beside = [(what, getattr(a, what), getattr(b, what)) for what in ("bias", "input_scale")]
    unlike = [what for what, x, y in beside if (x is None) != (y is None) or (x is not None and _unlike(what, x, y))]
    if a.origin.dialect != b.origin.dialect:  # scales of inputs can be stored as their inverses
        unlike = [what for what in unlike if what != "input_scale"]
    if not unlike and _same_bytes(a, b):
        return None
    found = _distance(f"{a.origin.layout} and {b.origin.layout}", _values(a), _values(b))
    return "; ".join(filter(None, [found, *(f"{what} differs" for what in unlike)]))


def _unlike(what: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype != b.dtype or a.shape != b.shape or not torch.equal(as_bytes(a), as_bytes(b))


def _same_bytes(a: StoredWeight, b: StoredWeight) -> bool:
    of_a, of_b = a.weight.buffers(), b.weight.buffers()
    known = (a.origin.dialect, a.origin.layout, a.origin.dtypes) == (b.origin.dialect, b.origin.layout, b.origin.dtypes)
    return known and of_a.keys() == of_b.keys() and all(torch.equal(as_bytes(of_a[n]), as_bytes(of_b[n])) for n in of_a)


def _values(value: StoredWeight | torch.Tensor) -> torch.Tensor:
    return value.dequantize(torch.float32) if isinstance(value, StoredWeight) else value


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in one dimension."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _distance(what: str, a: torch.Tensor, b: torch.Tensor) -> str:
    """ "" if the values are the same, -0 and 0 too."""
    if not (a.dtype.is_floating_point and b.dtype.is_floating_point):
        return f"{what}, other values"
    x, y = a.float(), b.float()
    unlike = (x != y) & ~(x.isnan() & y.isnan())
    count, of = int(unlike.sum()), counted(x.numel(), "value")
    if count == 0:
        return ""
    nan = unlike & (x.isnan() | y.isnan())
    numbers = unlike & ~nan
    ulp = int((ordered(x) - ordered(y)).abs()[numbers].max()) if bool(numbers.any()) else 0
    how = [f"{int(nan.sum())} in NaN"] if bool(nan.any()) else []
    if ulp:
        how.append(f"at most {ulp} ulp of float32" if ulp <= _MOST_ULP else "other values")
    return f"{what}: {count} of {of} {'differs' if count == 1 else 'differ'}, {', '.join(how)}"


def ordered(values: torch.Tensor) -> torch.Tensor:
    """float32 as integers in the same order: neighbours differ by 1."""
    bits = values.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
