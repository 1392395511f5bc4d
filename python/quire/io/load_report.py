"""The report of quire.io.load()."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.io.errors import some


@dataclass(frozen=True)
class LoadReport:
    """The result of load(). str() gives a summary.

    dialect: its name, or None if no layer is quantized. quantized: name of a quantized weight -> recipe of its layer.
    plain: names of the other parameters. missing: names that only the model has. unused: names that only the checkpoint
    has (scales of key-value caches are kept for saving). notes: choices that load() made.
    """

    path: str
    dialect: str | None
    quantized: Mapping[str, str]
    plain: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        recipes: dict[str, int] = {}
        for recipe in self.quantized.values():
            recipes[recipe] = recipes.get(recipe, 0) + 1
        lines = [f"{self.path}: {self.dialect or 'nothing quantized'}, {len(self.plain)} plain parameters"]
        lines += [f"  {count:5} weights: {recipe}" for recipe, count in recipes.items()]
        lines += [f"  missing: {some(self.missing)}"] if self.missing else []
        lines += [f"  unused: {some(self.unused)}"] if self.unused else []
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
