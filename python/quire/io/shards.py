"""Files in safetensors' format, written one layer at a time. (The library's writer takes all tensors of a file.)"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quire.io.container import DTYPES, INDEX
from quire.io.errors import CheckpointError, some

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass
class Shard:
    """The tensors of one file: name -> what it will be, a meta tensor. keys: the entries that they belong to."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(nbytes(tensor) for tensor in self.tensors.values())


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def size_of(text: str | int) -> int:
    """Bytes of a size such as "5GB", of 10**9 bytes, or "512MiB". Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"max_shard_size must be a number of bytes or a text such as '5GB', got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def divided(entries: Iterable[tuple[str, Mapping[str, torch.Tensor]]], most: int) -> list[Shard]:
    """Shards of at most that many bytes, if no entry alone is larger. The tensors of an entry stay together."""
    shards, seen = [Shard()], {}
    for key, tensors in entries:
        size = sum(map(nbytes, tensors.values()))
        if shards[-1].keys and shards[-1].nbytes + size > most:
            shards.append(Shard())
        for name in tensors:
            if name in seen:
                raise CheckpointError(
                    f"{seen[name]} and {key} would both be written as this tensor", "rename one of them", tensor=name
                )
            seen[name] = key
        shards[-1].tensors |= tensors
        shards[-1].keys.append(key)
    return shards


def write_shards(
    folder: Path,
    shards: list[Shard],
    tensors_of: Callable[[str], Mapping[str, torch.Tensor]],
    metadata: Mapping[str, str],
) -> list[Path]:
    """Writes the files, and an index if there are several. tensors_of: the tensors of a key, which are read and dropped
    one key after another. Raises CheckpointError if they are not what the shard says."""
    from tqdm import tqdm

    count, files, weight_map = len(shards), [], {}
    # A bar appears after a second, where someone watches.
    total = sum(len(shard.keys) for shard in shards)
    bar = tqdm(total=total, desc="quire.io.write", unit="entry", delay=1, disable=None)
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        _write(folder / name, shard, tensors_of, metadata, bar)
        files.append(folder / name)
        weight_map |= dict.fromkeys(shard.tensors, name)
    bar.close()
    if count > 1:
        total = sum(shard.nbytes for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        files.append(folder / INDEX)
        write_json(folder / INDEX, index)
    return files


def _write(file: Path, shard: Shard, tensors_of: Callable, metadata: Mapping[str, str], bar: Any) -> None:
    # Larger elements first, so that each tensor is aligned: readers map files into memory.
    order = sorted(shard.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, offsets, end = {"__metadata__": {"format": "pt", **metadata}}, {}, 0
    for name, tensor in order:
        offsets[name] = end
        shape = list(tensor.shape)
        shape = [*shape[:-1], shape[-1] * 2] if tensor.dtype == torch.float4_e2m1fn_x2 else shape
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [end, end := end + nbytes(tensor)],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        start = out.tell()
        out.truncate(start + end)
        for key in shard.keys:
            bar.update()
            for name, tensor in tensors_of(key).items():
                planned = shard.tensors[name]
                if (tensor.dtype, tensor.shape) != (planned.dtype, planned.shape):
                    raise CheckpointError(
                        f"expected {planned.dtype} {list(planned.shape)}, got {tensor.dtype} {list(tensor.shape)}",
                        "the source changed while it was written; write again",
                        tensor=name,
                    )
                out.seek(start + offsets[name])
                out.write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def replaced(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder whose files replace those of `folder` if nothing fails; else nothing has changed. Raises
    CheckpointError if there is a checkpoint and it must not be overwritten."""
    old = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")] if folder.is_dir() else []
    if folder.exists() and not folder.is_dir():
        raise CheckpointError("is a file", "pass a folder", file=folder)
    if old and not overwrite:
        raise CheckpointError(
            f"the folder has a checkpoint: {some(sorted(file.name for file in old))}",
            "pass an empty folder, or overwrite=True (--overwrite)",
            file=folder,
        )
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".partial-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        yield partial
        made = sorted(partial.iterdir())
        for file in made:
            os.replace(file, folder / file.name)
        for file in old:
            if file.name not in {one.name for one in made}:
                file.unlink()
    finally:
        shutil.rmtree(partial, ignore_errors=True)
