"""GGUF files as a set of named tensors, read by the package gguf."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quire.io.container import CheckpointError, Entry, some

#: Where descriptions have the type of each tensor by its name.
KEY = "gguf"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_INTEGERS = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
DTYPES = _PLAIN | _INTEGERS
#: Types that a dialect reads with their codes and scales. Tensors of other quantized types are decoded.
BLOCKS = ("MXFP4", "NVFP4")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


class GgufFile:
    """The tensors of a GGUF file, or of all files of a model that llama.cpp has split. As quire.io.container.Container;
    descriptions["gguf"] has the type of each tensor.

    path: a file, one of the files of a split model, or a folder with one model.

    Plain tensors have their dtype and shape (rows first). Tensors of BLOCKS are uint8 [..., bytes of a row]. Tensors of
    other quantized types that the package decodes, such as Q8_0 and Q4_K, are their values in float32.
    Raises CheckpointError for a damaged file and for files that are not all of one model, ImportError without the
    package gguf.
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
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self._stored: dict[str, Any] = {}
        self.header: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        files = _files(self.path)
        for number, file in enumerate(files):
            try:
                reader = GGUFReader(file)
            except Exception as error:  # the package raises ValueError, KeyError, IndexError and others for damage
                raise CheckpointError(f"is no complete GGUF file: {error}", "download it again", file=file) from error
            self._add(file, reader, (number, len(files)))
            if number == 0:
                said = _number(file, reader, "split.tensors.count", None)
        if said not in (None, len(self.header)):
            raise CheckpointError(
                f"the files have {len(self.header)} tensors, and the first one says that there are {said}",
                "download all of them of one revision",
                file=files[0],
            )
        self.configs: dict[str, Any] = {}
        types = {name: stored.tensor_type.name for name, stored in self._stored.items()}
        self.descriptions: dict[str, Any] = {KEY: types}

    def _add(self, file: Path, reader: Any, place: tuple[int, int]) -> None:
        """The tensors and texts of one file. place: its number, and how many files there are."""
        found = tuple(_number(file, reader, f"split.{key}", default) for key, default in (("no", 0), ("count", 1)))
        if found != place:
            raise CheckpointError(
                f"the file says that it is number {found[0] + 1} of {found[1]}, its name that of {place[0] + 1} of "
                f"{place[1]}",
                "give the files the names that llama.cpp gave them, X-00001-of-00003.gguf and so on",
                file=file,
            )
        for each in reader.tensors:
            if each.name in self.header:
                other = self.header[each.name].file
                where = "the file has two such tensors" if other == file else f"the tensor is in {other.name} too"
                raise CheckpointError(where, "download it again", file=file, tensor=each.name)
            self._stored[each.name] = each
            self.header[each.name] = _entry(file, each)
        for name in ("general.architecture", "general.name"):
            if (field := reader.get_field(name)) is not None:
                self.metadata.setdefault(name, str(field.contents()))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, copied to memory."""
        from gguf.quants import dequantize

        entry, stored = self.header[name], self._stored[name]
        if entry.stored:
            return torch.from_numpy(dequantize(stored.data, stored.tensor_type)).reshape(entry.shape)
        return torch.from_numpy(stored.data.copy()).view(entry.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)


def _entry(file: Path, stored: Any) -> Entry:
    kind = stored.tensor_type.name
    shape = tuple(int(size) for size in reversed(stored.shape))
    if kind in DTYPES:
        return Entry(stored.name, file, DTYPES[kind], shape)
    if kind not in BLOCKS and _decodes(stored.tensor_type):
        return Entry(stored.name, file, torch.float32, shape, stored=kind, size=math.prod(stored.data.shape))
    return Entry(stored.name, file, torch.uint8, (*shape[:-1], stored.data.shape[-1]))


def _number(file: Path, reader: Any, name: str, default: int | None) -> int | None:
    """A number that a file says; the default if it does not say it."""
    field = reader.get_field(name)
    try:
        return default if field is None else int(field.contents())
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is no number: {error}", "download it again", file=file) from error


@functools.cache
def _decodes(kind: Any) -> bool:
    """Whether the package decodes a type: it has no list of these."""
    import numpy
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(numpy.zeros((1, GGML_QUANT_SIZES[kind][1]), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _files(path: Path) -> list[Path]:
    """The files of a model, in their order."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        models = {_SPLIT.sub(r"\g<stem>-of-\g<count>", file.name) for file in found}
        if len(models) != 1:
            raise CheckpointError(
                f"the folder has {len(models)} models: {some(sorted(models))}", "pass the file of one", file=path
            )
        path = found[0]
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    files = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing or path not in files:
        raise CheckpointError(
            f"the name says {match['number']} of {match['count']}"
            + (f", and the folder lacks {some(missing)}" if missing else ""),
            "download all files of the model into one folder",
            file=path,
        )
    return files
