"""What a model remembers of the checkpoint that it was loaded from, for saving it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.io.fitting import Source
from quire.tensor.origin import Origin

_ATTRIBUTE = "_quire_checkpoint"


@dataclass
class Record:
    """path, dialect, configs: of the checkpoint. sources: name of a parameter -> the entries that it was made of, and
    the rows of each. layouts, input_scales: name of a quantized weight in the checkpoint -> name of its layout, static
    scale of its input. dtypes: of plain entries. other: entries that no parameter was made of and that files need, such
    as scales of caches."""

    path: str
    dialect: str | None
    configs: Mapping[str, Any]
    sources: dict[str, tuple[Source, tuple[tuple[int, ...], ...]]] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    input_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    other: dict[str, torch.Tensor] = field(default_factory=dict)

    def origin(self, name: str) -> Origin | None:
        """Where a weight of that name was in the checkpoint; None if it was not quantized there."""
        return Origin(self.dialect or "", self.layouts[name]) if name in self.layouts else None


def remember(model: torch.nn.Module, record: Record) -> None:
    vars(model)[_ATTRIBUTE] = record


def record_of(model: torch.nn.Module) -> Record | None:
    """None for a model that was not loaded by quire.io."""
    found = vars(model).get(_ATTRIBUTE)
    return found if isinstance(found, Record) else None


def forget(model: torch.nn.Module) -> None:
    """The model is not that of the checkpoint any more."""
    vars(model).pop(_ATTRIBUTE, None)
