"""safetensors files as one set of named tensors, read lazily: one file, or shards with an index. CheckpointError is the
error of all of quire.io."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"
#: The key of the headers' texts in `descriptions`.
METADATA = "__metadata__"
#: The key in `descriptions` of JSON texts that are stored as tensors of bytes: name of the tensor -> text.
TEXTS = "__texts__"
_IS_TEXT = ".comfy_quant"
#: Names of dtypes in files. safetensors has no public table of them.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, without its data. shape: of the torch tensor (a file counts two elements in a byte of F4).
    stored, size: for a tensor that is decoded when it is read, its type in the file, such as "Q8_0", and its bytes
    there; dtype and shape are then those of the decoded values."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: str = ""
    size: int = 0

    @property
    def nbytes(self) -> int:
        return self.size if self.stored else torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.stored or str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


Header = Mapping[str, Entry]


def _safe_open() -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "quire.io: reading checkpoints needs the package safetensors, which is not installed; "
            "pip install safetensors"
        ) from error
    return safe_open


class Container:
    """The tensors of a checkpoint by name. Only headers are read until tensor() is called.

    path: a folder with one .safetensors file or an index and its shards, an index, or a .safetensors file.
    header: name -> Entry. configs: name of a file -> what its JSON holds, of the folder's config.json and
    hf_quant_config.json. metadata: texts of the headers.

    Raises CheckpointError for anything else: no or several files without an index, a damaged or truncated file, a name
    in two shards, an index that names a tensor or file that does not exist, or that leaves one out.
    """

    CONFIGS = ("config.json", "hf_quant_config.json")

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.index, files = _files(self.path)
        self._handles: dict[Path, Any] = {}
        self.header: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        for file in files:
            self._add(file)
        if self.index is not None:
            _check_index(self.folder, self.index, self.header)
        found = (self.folder / name for name in self.CONFIGS)
        self.configs = {file.name: read_json(file) for file in found if file.is_file()}

    def _add(self, file: Path) -> None:
        handle = self._open(file)
        for name in handle.keys():
            if name in self.header:
                raise CheckpointError(
                    f"the tensor is in {self.header[name].file.name} too; a name belongs to one shard",
                    "delete the shards of another export from the folder, or download it again",
                    file=file,
                    tensor=name,
                )
            part = handle.get_slice(name)
            kind, shape = part.get_dtype(), tuple(part.get_shape())
            if kind not in DTYPES:
                raise CheckpointError(
                    f"dtype {kind} has no counterpart in PyTorch; known are {', '.join(DTYPES)}",
                    "quire does not read this checkpoint",
                    file=file,
                    tensor=name,
                )
            shape = (*shape[:-1], shape[-1] // 2) if kind == "F4" else shape
            self.header[name] = Entry(name, file, DTYPES[kind], shape)
        self.metadata |= handle.metadata() or {}

    def _open(self, file: Path) -> Any:
        safe_open = _safe_open()
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except Exception as error:  # SafetensorError, OSError: the library has no common class
                raise CheckpointError(
                    f"is no complete safetensors file: {error}", "copy or download it again", file=file
                ) from error
        return self._handles[file]

    @functools.cached_property
    def descriptions(self) -> Mapping[str, Mapping[str, Any]]:
        """Everything that says how to read the tensors: the configurations, the texts of the headers, and texts that
        are stored as tensors."""
        names = [name for name, entry in self.header.items() if name.endswith(_IS_TEXT) and entry.dtype == torch.uint8]
        return {**self.configs, METADATA: self.metadata, TEXTS: {name: self._text(name) for name in names}}

    def _text(self, name: str) -> Any:
        try:
            return json.loads(bytes(self.tensor(name).reshape(-1).tolist()))
        except ValueError as error:
            raise CheckpointError(
                f"the bytes of the tensor are no JSON text: {error}",
                "download the file again",
                file=self.header[name].file,
                tensor=name,
            ) from error

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, copied to memory, so that the pages of the file can be freed."""
        handle = self._open(self.header[name].file)
        return handle.get_tensor(name).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)


def _files(path: Path) -> tuple[dict[str, str] | None, list[Path]]:
    """The weight map of the index (None if there is no index), and the .safetensors files."""
    if not path.exists():
        raise CheckpointError("there is no such file or folder", "pass the folder of a checkpoint", file=path)
    if path.is_file() and path.suffix == ".safetensors":
        return None, [path]
    index = path
    if path.is_dir():  # under the name of transformers, or the only one
        others = list(path.glob("*.safetensors.index.json"))
        index = others[0] if len(others) == 1 else path / INDEX
    if not index.is_file():
        found = sorted(path.glob("*.safetensors"))
        if len(found) == 1:
            return None, found
        raise CheckpointError(
            f"expected one .safetensors file or {INDEX}, found {len(found)} files and no index",
            "pass the file to read, or download the index too",
            file=path,
        )
    weight_map = read_json(index).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not is_map or any(Path(file).name != file for file in weight_map.values()):
        raise CheckpointError(
            "weight_map must map names of tensors to names of files of the same folder", "download it again", file=index
        )
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"the index names {some(missing)}, which the folder does not have",
            "download the missing shards",
            file=index,
        )
    return weight_map, files


def _check_index(folder: Path, weight_map: Mapping[str, str], header: Header) -> None:
    for name, file in weight_map.items():
        if name not in header or header[name].file.name != file:
            raise CheckpointError(
                f"{INDEX} says that the tensor is in this file, which does not have it",
                "download the index and the shards of one revision",
                file=folder / file,
                tensor=name,
            )
    for name, entry in header.items():
        if name not in weight_map:
            raise CheckpointError(
                f"the file has a tensor that {INDEX} does not list",
                "download the index and the shards of one revision",
                file=entry.file,
                tensor=name,
            )


def read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file. Raises CheckpointError unless it is an object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"is no JSON file: {error}", "copy or download it again", file=file) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"expected a JSON object, got {type(found).__name__}", "download it again", file=file)
    return found


class CheckpointError(ValueError):
    """A checkpoint that breaks a rule, or that cannot be written as asked. Nothing has been changed.

    Args:
        rule: what does not hold, with the values received.
        remedy: what to do.
        file: where, or None.
        tensor: the name of a tensor or layer, or None.
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
