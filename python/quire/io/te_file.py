"""Files of torch.save with tensors of TransformerEngine, as a set of named plain tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quire.io.container import Entry
from quire.io.errors import CheckpointError, some
from quire.io.te_pickle import Inert, Rebuilt, load_file

#: Where descriptions have what a file says of quantized tensors beside their buffers: name -> kind, shape, dtype...
KEY = "te"
#: Fields of the reconstructors' arguments, in order. Later versions appended those at the end.
_FIELDS = {
    "float8": "rowwise_data element rowwise_scale dtype shape columnwise_data",
    "float8_blockwise": (
        "shape rowwise_data rowwise_scale columnwise_data columnwise_scale element dtype quantizer tiles format"
    ),
    "mxfp8": ("rowwise_data rowwise_scale columnwise_data columnwise_scale element dtype shape quantizer swizzled"),
    "nvfp4": (
        "shape rowwise_data rowwise_scale columnwise_data columnwise_scale rowwise_amax columnwise_amax element dtype "
        "quantizer swizzled row_scaled four_over_six largest_scale"
    ),
}
#: How many of these every version has.
_LEAST = {"float8": 5, "float8_blockwise": 9, "mxfp8": 7, "nvfp4": 10}
#: Keys under which training scripts put the state dict of the model.
_NESTED = ("model", "module", "state_dict", "model_state_dict")
_REMEDY = "save model.state_dict() with torch.save"


class TeFile:
    """The tensors of a file of torch.save. Those that TransformerEngine quantized are several, NAME#rowwise_data and so
    on; descriptions["te"] has the rest of each by NAME. As quire.io.container.Container; all tensors are in memory.

    Raises CheckpointError for a file that names other code than TransformerEngine's tensors (see te_pickle.py).
    """

    index = None

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = self.path.parent
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        described = {}
        for name, value in _state_dict(load_file(self.path), self.path).items():
            if isinstance(value, Rebuilt):
                described[name] = self._add(name, value)
            elif isinstance(value, torch.Tensor):
                self._tensors[name] = value.detach()
        self.configs: dict[str, Any] = {}
        self.descriptions: dict[str, Any] = {KEY: described}
        self.header = {
            name: Entry(name, self.path, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()
        }

    def _add(self, name: str, value: Rebuilt) -> dict[str, object]:
        fields = _FIELDS[value.kind].split()
        if not _LEAST[value.kind] <= len(value.args) <= len(fields):
            raise CheckpointError(
                f"a tensor of kind {value.kind} has {len(value.args)} fields, expected {_LEAST[value.kind]} to "
                f"{len(fields)}",
                "the file is of a version that quire does not know",
                file=self.path,
                tensor=name,
            )
        rest: dict[str, object] = {"kind": value.kind}
        for field, one in zip(fields, value.args, strict=False):
            if isinstance(one, torch.Tensor):
                self._tensors[f"{name}#{field}"] = one.detach()
            elif field == "quantizer":
                rest |= dict(one.state) if isinstance(one, Inert) else {}
            else:
                rest[field] = one
        return rest

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)


def _state_dict(value: object, file: Path) -> Mapping[str, object]:
    for key in _NESTED:
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
            break
    tensors = isinstance(value, Mapping) and any(isinstance(one, torch.Tensor | Rebuilt) for one in value.values())
    if not tensors or not all(isinstance(key, str) for key in value):
        found = some([str(key) for key in value]) if isinstance(value, Mapping) else type(value).__name__
        raise CheckpointError(f"expected a dict from names to tensors, got {found}", _REMEDY, file=file)
    return value
