"""Errors of checkpoints: each names the file, the tensor, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that breaks a rule, or that cannot be written as asked. Nothing has been changed.

    file: where, or None. tensor: the name of a tensor or layer, or None. rule: what does not hold, with the values
    received. remedy: what to do.
    """

    def __init__(self, rule: str, remedy: str, *, file: Path | str | None = None, tensor: str | None = None) -> None:
        self.file = None if file is None else str(file)
        self.tensor, self.rule, self.remedy = tensor, rule, remedy
        where = ": ".join(str(part) for part in (file, tensor) if part)
        super().__init__(f"{where}: {rule}; {remedy}" if where else f"{rule}; {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return _error, (self.rule, self.remedy, self.file, self.tensor)


def _error(rule: str, remedy: str, file: str | None, tensor: str | None) -> CheckpointError:
    return CheckpointError(rule, remedy, file=file, tensor=tensor)


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names of a list that can be long."""
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
