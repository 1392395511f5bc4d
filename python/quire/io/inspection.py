"""What a checkpoint is, of its headers only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.io.container import Entry
from quire.io.dialects import dialect_of
from quire.io.errors import CheckpointError
from quire.io.layout import Group, check_zero_points, consumed, missing_inputs
from quire.io.reading import opened
from quire.io.unclaimed import OF_CACHES, check_consumed, check_unscaled, unscaled


@dataclass(frozen=True)
class Stored:
    """A quantized layer. layout: of the dialect. spec: of the weight. inputs: spec of its inputs. nbytes: of all of its
    tensors."""

    name: str
    layout: str
    spec: str
    inputs: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The result of inspect(). str() gives a table.

    path: as it was given. dialect: its name; None if no layer is quantized. layers: the quantized layers.
    plain: name -> dtype and shape as text, for tensors that are not quantized. caches: the names of scales of key-value
    caches. files, nbytes: the number of files and their size. problems: the broken rules, in words.
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
            f"{self.path}\n{self.dialect or 'nothing quantized'}, {self.files} files, {_size(self.nbytes)}; "
            f"{len(self.layers)} quantized layers of {_size(quantized)}, {len(self.plain)} plain tensors, "
            f"{len(self.caches)} scales of caches"
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
        return "\n".join([head, *table(rows), *(f"problem: {problem}" for problem in self.problems)])

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        layers = [{**vars(layer), "shape": list(layer.shape)} for layer in self.layers]
        return {**vars(self), "layers": layers, "caches": list(self.caches), "problems": list(self.problems)}


def inspect(path: str | Path) -> Inspection:
    """Describes a checkpoint from its headers, without reading tensors: the dialect, the layers and broken rules.

    path: as for read(). Raises CheckpointError only if there are no readable headers; broken rules are listed in the
    result.
    """
    container = opened(path)
    header, problems, groups = container.header, [], []
    dialect = dialect_of(container)
    try:
        groups = [] if dialect is None else dialect.groups(header, container.descriptions)
        check_consumed(groups, header)
        check_unscaled(unscaled(groups, header), header)
        check_zero_points(groups, header, container.tensor)
    except CheckpointError as error:
        problems.append(str(error))
    problems += [f"{name}: the static scale of an input is missing" for name in missing_inputs(groups)]
    used = consumed(groups)
    caches = tuple(name for name in header if OF_CACHES.search(name) and name not in used)
    plain = {name: str(entry) for name, entry in header.items() if name not in used and name not in caches}
    layers = tuple(_stored(group, header) for group in groups)
    files = {entry.file for entry in header.values()}
    total = sum(entry.nbytes for entry in header.values())
    name = None if dialect is None else dialect.name
    return Inspection(str(path), name, layers, plain, caches, len(files), total, tuple(problems))


def _stored(group: Group, header: dict[str, Entry]) -> Stored:
    size = sum(header[name].nbytes for name in group.names.values())
    layout = group.layout
    inputs = layout.static if "input_scale" in group.names else layout.dynamic
    return Stored(group.name, layout.name, layout.spec, inputs, tuple(group.shape), size)


def _pattern(name: str) -> str:
    """A name with its numbers left out: layers of one kind have one."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


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
