"""A checkpoint as the new weights of a model (quire.refit)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from quire.io.container import CheckpointError
from quire.io.fitting import Target, fit
from quire.io.into_model import is_quantized, plain_value
from quire.io.joining import of_one
from quire.io.layout import StoredWeight
from quire.io.reading import Checkpoint, opened
from quire.tensor import QuantizedStack, QuantizedTensor


def fitted(model: torch.nn.Module, path: str | Path) -> Mapping[str, torch.Tensor]:
    """The weights of a checkpoint by their names in the model, each read when it is asked for. What belongs to no
    parameter has its name in the checkpoint. Raises CheckpointError as load() does."""
    return _Fitted(model, Checkpoint(opened(path)))


class _Fitted(Mapping[str, torch.Tensor]):
    def __init__(self, model: torch.nn.Module, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        targets = [target for target in fit(model, checkpoint, None, "auto") if target.source is not None]
        used = {ref.entry for target in targets for ref in target.source.refs()}
        used |= {entry for target in targets for entry in target.same}
        self._targets: dict[str, Target | None] = {target.name: target for target in targets}
        self._targets |= dict.fromkeys(name for name in checkpoint if name not in used)

    def __getitem__(self, name: str) -> torch.Tensor:
        target = self._targets[name]
        if target is None:
            value = self._checkpoint[name]
            return value.weight if isinstance(value, StoredWeight) else value
        return self._codes(target) if is_quantized(target, self._checkpoint) else plain_value(target, self._checkpoint)

    def _codes(self, target: Target) -> QuantizedTensor:
        joined = [matrix for matrix in target.source.matrices if len(matrix) > 1]
        if joined:
            raise CheckpointError(
                "the parameter is joined from several quantized weights, which have scales of their own",
                "load the checkpoint into a new model (quire.io.load)",
                tensor=target.name,
            )
        each = [of_one(self._checkpoint[ref.entry], ref.index).weight for (ref,) in target.source.matrices]
        return QuantizedStack.of(each) if target.source.stacked else each[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
