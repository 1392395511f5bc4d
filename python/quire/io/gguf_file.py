"""GGUF files as a set of named tensors, read by the package gguf."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quire.io.container import Entry
from quire.io.errors import CheckpointError

#: Where descriptions have the type of each tensor by its name.
KEY = "gguf"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_INTEGERS = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
DTYPES = _PLAIN | _INTEGERS


class GgufFile:
    """The tensors of a GGUF file. As quire.io.container.Container; descriptions["gguf"] has the type of each tensor.

    Plain tensors have their dtype and shape (rows first). Quantized ones are uint8 [..., bytes of a row].
    Raises CheckpointError for a damaged file, ImportError without the package gguf.
    """

    index = None

    def __init__(self, path: str | Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError(
                "quire.io: reading GGUF files needs the package gguf, which is not installed; pip install 'quire[gguf]'"
            ) from error
        self.path = Path(path)
        self.folder = self.path.parent
        try:
            reader = GGUFReader(self.path)
        except Exception as error:  # the package raises ValueError, KeyError, IndexError and others for damage
            raise CheckpointError(f"is no complete GGUF file: {error}", "download it again", file=self.path) from error
        self._data: dict[str, Any] = {}
        self.header: dict[str, Entry] = {}
        types: dict[str, str] = {}
        for each in reader.tensors:
            if each.name in self.header:
                raise CheckpointError("the file has two such tensors", "download it again", file=path, tensor=each.name)
            kind = each.tensor_type.name
            shape = [int(size) for size in reversed(each.shape)]
            if kind not in DTYPES:
                shape[-1] = each.data.shape[-1]
            self._data[each.name], types[each.name] = each.data, kind
            self.header[each.name] = Entry(each.name, self.path, DTYPES.get(kind, torch.uint8), tuple(shape))
        self.configs: dict[str, Any] = {}
        self.descriptions: dict[str, Any] = {KEY: types}
        fields = (reader.get_field(name) for name in ("general.architecture", "general.name"))
        self.metadata = {field.name: str(field.contents()) for field in fields if field is not None}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, in memory of its own."""
        entry = self.header[name]
        data = torch.from_numpy(self._data[name].copy())
        return data.view(entry.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)
