"""A mapping of layers and tensors, written as a checkpoint of a dialect: safetensors files, one layer at a time."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch

from quire.checks import check_dense, check_type, check_type_or_none, counted
from quire.io.container import DTYPES, INDEX, METADATA, CheckpointError, Container, some
from quire.io.dialect import OF_FILES, Configs, Dialect, contents, described, has_other_amax
from quire.io.dialects import DIALECTS, dialect_named
from quire.io.layout import DIV, MUL, WITHOUT_VALUES, Group, Layout, StoredWeight
from quire.io.reading import Checkpoint
from quire.loading.float_mode import subnormals_kept
from quire.nn.input_scale import of_same_amax
from quire.tensor import QuantSpec

#: The weight of the output layer in transformers, which may be the weight of the embedding.
_HEAD = "lm_head.weight"
Tensors = Mapping[str, StoredWeight | torch.Tensor]


@dataclass(frozen=True)
class SaveReport:
    """What was written.

    str() has the notes first, and one line for all losses with one reason.

    Attributes:
        files: their names.
        layers: the number of quantized layers.
        tensors: the number of tensors in the files, those of quantized layers included.
        nbytes: the bytes of these tensors.
        losses: what differs from the source; empty with exact=True.
        notes: what a reader of the new file should know, first recipes that it changes.
        contents: the quantized layers and the plain tensors, counted as inspect() and load() count them.
    """

    files: tuple[str, ...]
    layers: int
    tensors: int
    nbytes: int
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()
    contents: str = ""

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "losses": [vars(loss) for loss in self.losses]}

    def __str__(self) -> str:
        others = [name for name in self.files if not name.endswith(".safetensors") and name != INDEX]
        lines = [
            f"{self.contents}; in all {counted(self.tensors, 'tensor')}, {counted(self.nbytes, 'byte')}; "
            f"{counted(len(self.files), 'file')}{' with the configurations' * bool(others)}"
        ]
        losses: dict[str, list[str]] = {}
        for loss in self.losses:
            losses.setdefault(loss.what, []).append(loss.tensor)
        for what, names in losses.items():
            patterns = [*dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)]
            several = some(patterns) if len(patterns) > 1 else f"{names[0]} ... {names[-1]}"
            lines.append(f"{names[0] if len(names) == 1 else f'{several}, {len(names)} tensors'}: {what}")
        return "\n".join([lines[0], *self.notes, *lines[1:]])


@dataclass
class Plan:
    """How each entry is written. layouts: name of a quantized weight -> its layout in the new file."""

    dialect: Dialect | None
    exact: bool
    layouts: dict[str, Layout] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def choose(self, name: str, stored: StoredWeight) -> None:
        """Decides on the layout of a quantized weight."""
        self.layouts[name] = chosen_layout(name, stored, self.dialect, self.notes)

    def tensors(self, name: str, value: StoredWeight | torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of an entry by their names in the file."""
        if isinstance(value, torch.Tensor):
            return {name: value}
        if self.dialect is None:
            raise CheckpointError(
                "the layer is quantized, and no dialect says how to write it", "pass dialect=", tensor=name
            )
        layout = self.layouts[name]
        spec = value.weight.spec_text
        value, losses = translated(name, value, layout, self.dialect.name)
        if losses and self.exact:
            raise CheckpointError(
                f"{self.dialect.name} cannot store the layer exactly, w={spec}: {losses[0].what}",
                'pass exact=False (--allow-ulp) to accept this, or choose another dialect ("quire" has every spec)',
                tensor=name,
            )
        self.losses.extend(losses)
        return self.dialect.write(name, value, layout)


@subnormals_kept()
def write(
    path: str | Path,
    tensors: Tensors,
    *,
    dialect: str | None,
    config: Mapping[str, Any] | None = None,
    exact: bool = True,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
) -> SaveReport:
    """Writes layers and tensors as a checkpoint of a dialect, one entry at a time.

    Args:
        path: a folder, also for a single file: its name is model.safetensors.
        tensors: name of a parameter -> StoredWeight or plain tensor, such as the result of read(). An entry that was
            read from the same dialect is written with the same names, dtypes, shapes and bytes.
        dialect: its name; None if nothing is quantized.
        config: the content of config.json, to which the dialect adds what it says about layers; or name of a file ->
            content, written unchanged. None: the configuration with which `tensors` was read.
        exact: raise CheckpointError if the dialect cannot store a layer such that converting it back gives the same
            bytes.
        max_shard_size: bytes, or a text such as "5GB".
        overwrite: replace a checkpoint that the folder has.

    Returns:
        A SaveReport.

    Raises:
        CheckpointError: before anything is written, or after the parts written so far were removed: if the dialect
            cannot store a layer, if the folder has a checkpoint and overwrite is False, for a tensor on the meta device
            or of a dtype that safetensors does not have, and for a name that files use for something else.
        ValueError: for another max_shard_size, for a file of config outside the folder, and for a path that is the name
            of a file of weights.
        TypeError: for arguments of a wrong type, a tensor that is not dense, and a config that is not JSON.
    """
    check_type("quire.io.write", Mapping, tensors=tensors)
    check_type("quire.io.write", str | Path, path=path)
    check_type_or_none("quire.io.write", str, dialect=dialect)
    options = written_as("quire.io.write", path, exact, max_shard_size, overwrite)
    for name in tensors:
        check_type("quire.io.write", str, **{"a key of tensors": name})
    _check_config(config)
    source = tensors if isinstance(tensors, Checkpoint) else None
    base = {} if source is None else dict(source.container.configs)
    of_source = None if source is None else source.dialect
    layouts = {name: group.layout.name for name, group in source.groups.items()} if source is not None else None
    unchanged = layouts if config is None and dialect == of_source else None
    if config is not None and _is_of_files(config):
        base, unchanged = dict(config), ...
    elif config is not None:
        base["config.json"] = dict(config)
    chosen = None if dialect is None else dialect_named(dialect)
    return write_planned(Path(path), tensors, chosen, base=base, unchanged=unchanged, **options)


#: How names of files of weights end.
_OF_WEIGHTS = (".safetensors", ".gguf", ".pt", ".pth", ".bin")


def written_as(
    what: str, folder: str | Path, exact: object, max_shard_size: object, overwrite: object
) -> dict[str, Any]:
    """The arguments of write_planned() that all calls have. Raises TypeError or ValueError for wrong ones, and for a
    folder with the name of a file."""
    check_type(what, bool, exact=exact, overwrite=overwrite)
    if Path(folder).suffix.lower() in _OF_WEIGHTS:
        raise ValueError(
            f"{what}: the checkpoint is written into a folder, and {str(folder)!r} is the name of a file; pass a "
            f"folder, such as {str(Path(folder).with_suffix(''))!r}, which gets the file model.safetensors"
        )
    return {"exact": exact, "most": size_of(what, max_shard_size), "overwrite": overwrite}


def _check_config(config: object) -> None:
    """Raises TypeError or ValueError for what write() cannot write as config.json or as several files."""
    what = "quire.io.write"
    check_type_or_none(what, Mapping, config=config)
    content = dict(config or {})
    for name in content:
        check_type(what, str, **{"a key of config": name})
    for name in content if _is_of_files(content) else ():
        if Path(name).name != name or name == INDEX:
            raise ValueError(
                f"{what}: a file of config must be in the folder itself, and not be the index, which write() makes; "
                f"got {name!r}"
            )
        if name in Container.CONFIGS:
            check_type(what, Mapping, **{name: content[name]})
    try:
        json.dumps(content)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what}: config must have a form in JSON: {error}; pass dicts, lists, texts and numbers"
        ) from None


def _is_of_files(config: Mapping[str, object]) -> bool:
    """Whether an argument config has the content of several files, by their names."""
    return bool(config) and all(name.endswith(".json") for name in config)


def write_planned(
    path: Path,
    tensors: Tensors,
    dialect: Dialect | None,
    *,
    base: Configs,
    unchanged: Mapping[str, str] | EllipsisType | None,
    exact: bool,
    most: int,
    overwrite: bool,
    beside: Path | None = None,
) -> SaveReport:
    """write() with given configurations. unchanged: the layout of each layer that `base` describes; `base` is written
    unchanged if the layers get these layouts. ...: it is written unchanged in any case. None: the dialect completes it.
    most: the bytes of a file. beside: a folder whose small files are copied."""
    plan, meta, shapes, outlines = Plan(dialect, exact, notes=[*getattr(tensors, "notes", ())]), {}, {}, {}
    marked = getattr(dialect, "marks_files", False)
    for name in [name for name in tensors if marked or not OF_FILES.search(name)]:
        outline = tensors.outline(name) if hasattr(tensors, "outline") else outlined(name, tensors[name])
        if isinstance(outline, StoredWeight) and plan.dialect is not None:
            plan.choose(name, outline)
        meta[name], shapes[name] = plan.tensors(name, outline), tuple(outline.shape)
        outlines[name] = outline, plan.layouts.get(name)
    if dialect is not None and not plan.layouts and not unchanged:
        raise CheckpointError(
            f"{dialect.name} is a dialect of quantized layers, and no layer is quantized",
            "quantize first: quire.convert(model, recipe, for_inference=True), or requantize=SPEC with filter= "
            "(--requantize, --filter), which names the weights in high precision to quantize. Or write plain tensors: "
            "quire.io.write(path, model.state_dict(), dialect=None)",
            file=path,
        )
    shards = in_shards(meta.items(), most)
    same = unchanged is ... or unchanged == {name: layout.name for name, layout in plan.layouts.items()}
    configs = base if dialect is None or same else planned_configs(plan, base, shapes, getattr(tensors, "tied", ()))
    metadata = dict(getattr(tensors, "metadata", {}))
    metadata = {name: text for name, text in metadata.items() if marked or not OF_FILES.search(name)}
    metadata = dialect.texts(metadata, outlines) if hasattr(dialect, "texts") else metadata
    with replaced(path, overwrite) as folder:
        files = [
            file.name for file in write_shards(folder, shards, lambda name: plan.tensors(name, tensors[name]), metadata)
        ]
        for name, content in configs.items():
            write_json(folder / name, content)
            files.append(name)
        files += [] if beside is None else copied(beside, folder, files)
    count, size = sum(map(len, meta.values())), sum(nbytes(t) for each in meta.values() for t in each.values())
    notes = tuple(dict.fromkeys(plan.notes))
    losses, layers = tuple(dict.fromkeys(plan.losses)), len(plan.layouts)
    counts = contents(layers, [name for name in meta if name not in plan.layouts])
    return SaveReport(tuple(files), layers, count, size, losses, notes, counts)


def outlined(name: str, value: object) -> StoredWeight | torch.Tensor:
    """An entry on the meta device. Raises TypeError for other objects, CheckpointError for tensors without values."""
    if isinstance(value, StoredWeight):
        parts = {"weight": value.weight, "input_scale": value.input_scale, "bias": value.bias}
        return StoredWeight(
            *(None if t is None else _on_meta(name, part, t) for part, t in parts.items()), value.origin
        )
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"quire.io.write: {name} must be a StoredWeight or a plain tensor, got {type(value).__name__}; a "
            "QuantizedTensor needs an origin, StoredWeight(weight, None, None, Origin(dialect, layout))"
        )
    return _on_meta(name, "tensor", value.detach())


def _on_meta(name: str, part: str, tensor: torch.Tensor) -> torch.Tensor:
    """A part of an entry without its values, which the files get. Raises TypeError or CheckpointError if it has none in
    plain memory."""
    check_dense(f"quire.io.write: {name}", **{part: tensor})
    if tensor.is_meta:
        raise CheckpointError(f"the {part} is on the meta device and has no values", "load them first", tensor=name)
    return tensor.to("meta")


def planned_configs(
    plan: Plan, base: Configs, shapes: Mapping[str, tuple[int, ...]], tied: Sequence[str] = ()
) -> dict[str, Any]:
    """Name of a file -> content. tied: modules of the model whose weight is in the file under another name. They are
    listed as not quantized, because readers expect scales for all other linear layers."""
    plain = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name not in plan.layouts and name.endswith(".weight") and len(shape) == 2
    ]
    if any(name.endswith(_HEAD) for name in plan.layouts) and "config.json" in base:
        base = {**base, "config.json": _untied(base["config.json"])}
    says_tied = base.get("config.json", {}).get("tie_word_embeddings") is True
    if says_tied and not any(name.endswith(_HEAD) for name in shapes):
        tied = [*tied, _HEAD.removesuffix(".weight")]
    groups = [Group(name, layout, shapes[name], {}) for name, layout in plan.layouts.items()]
    return plan.dialect.config(groups, [*dict.fromkeys([*plain, *tied])], base)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of transformers, and those of parts of the model in it, by which the output layer has a weight of
    its own: an embedding has no codes that it could share with a quantized one."""
    found = {key: _untied(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    return found | ({"tie_word_embeddings": False} if found.get("tie_word_embeddings") is True else {})


def copied(source: Path, target: Path, written: Sequence[str]) -> list[str]:
    """Copies the small files beside the weights that say nothing about layers, such as the tokenizer's."""
    kinds, found = (".json", ".txt", ".model", ".jinja", ".md", ".py", ".tiktoken"), []
    says = {*written, INDEX, *Container.CONFIGS}
    for file in sorted(source.iterdir()) if source.is_dir() else ():
        if file.is_file() and file.suffix in kinds and file.name not in says:
            (target / file.name).write_bytes(file.read_bytes())
            found.append(file.name)
    return found


# --- safetensors files, written one layer at a time. (The library's writer takes all tensors of a file.)


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


def size_of(what: str, text: object) -> int:
    """Bytes of a size such as "5GB", of 10**9 bytes, or "512MiB". Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    size = 0 if found is None else int(float(found[1]) * _UNITS.get(found[2].upper(), 0))
    if size < 1:
        raise ValueError(f"{what}: max_shard_size must be a number of bytes or a text such as '5GB', got {text!r}")
    return size


def in_shards(entries: Iterable[tuple[str, Mapping[str, torch.Tensor]]], most: int) -> list[Shard]:
    """Shards of at most that many bytes, unless one entry is larger. The tensors of an entry stay together. Raises
    CheckpointError for what files cannot hold."""
    shards, seen = [Shard()], {}
    for key, tensors in entries:
        size = sum(map(nbytes, tensors.values()))
        if shards[-1].keys and shards[-1].nbytes + size > most:
            shards.append(Shard())
        for name, tensor in tensors.items():
            if name == METADATA:
                raise CheckpointError("a file has its own texts under this name", "rename the tensor", tensor=name)
            if tensor.dtype not in _NAMES:
                raise CheckpointError(
                    f"files have no {tensor.dtype}, but {', '.join(DTYPES)}", "convert it", tensor=name
                )
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


# --- a layer of one dialect in the layout of another: the same codes, and scales that mean the same


@dataclass(frozen=True)
class Loss:
    """What a layer has lost. ulp: the largest difference of a scale that is converted back, in units in the last place
    of float32; 0 for a tensor that is left out."""

    tensor: str
    what: str
    ulp: int

    def __str__(self) -> str:
        return f"{self.tensor}: {self.what}"


def chosen_layout(name: str, stored: StoredWeight, dialect: Dialect, notes: list[str]) -> Layout:
    """The layout in which a dialect stores a layer: the one it was read from, or Dialect.choose()."""
    source = source_layout(stored)
    if source is not None and stored.origin.dialect == dialect.name:
        return source
    layout = dialect.choose(name, stored, source, notes)
    if source is not None and source.alternating and not layout.alternating:
        notes.append(
            f"{described(stored)} -> {dialect.name} {layout.name}: rows of gate and up are in turn in the one. In the "
            "other all rows of the gate come first, as in quire.MoE, but not in transformers"
        )
    return layout


def source_layout(stored: StoredWeight) -> Layout | None:
    """The layout from which a layer was read; None if it is in no dialect's table."""
    dialect = next((one for one in DIALECTS if one.name == stored.origin.dialect), None)
    return None if dialect is None else dialect.layout(stored.origin.layout)


def translated(name: str, stored: StoredWeight, layout: Layout, dialect: str) -> tuple[StoredWeight, list[Loss]]:
    """The layer with scales as the layout has them, and what would be different after converting it back."""
    if (stored.origin.dialect, stored.origin.layout) == (dialect, layout.name):
        return stored, []
    source = source_layout(stored)
    kept = [stored.origin.names[role] for role in stored.origin.verbatim if role not in WITHOUT_VALUES]
    losses = [Loss(name, f"{tensor} has no place there", 0) for tensor in kept]
    weight = stored.weight
    if weight.spec_text != (wanted := QuantSpec(layout.spec)).text:
        buffers = weight.buffers()
        if wanted.family == "nvfp4":
            ways = _way(weight.spec_text), _way(layout.spec)
            amax = buffers["rowwise_amax"]
            buffers["rowwise_amax"], lost = rescaled(name, "the global scale", amax, ways, _largest(weight.spec_text))
            losses += lost
        elif wanted.family == "fp8_row" and weight.spec.family == "fp8_tensor":
            del buffers["rowwise_amax"]
            scale = buffers["rowwise_scale"]
            buffers["rowwise_scale"] = scale.expand(*weight.shape[:-1]).contiguous()
        weight = type(weight).from_buffers(buffers, wanted, tuple(weight.shape), weight.dtype)
    input_scale, lost = translated_input(name, stored, source, layout)
    return replace(stored, weight=weight, input_scale=input_scale), losses + lost


def translated_input(
    name: str, stored: StoredWeight, source: Layout | None, layout: Layout
) -> tuple[torch.Tensor | None, list[Loss]]:
    """The static scale of the input as the layout has it, and what would be different after converting it back. A scale
    that was measured for another format becomes the one of the same amax. This is no loss: Dialect.choose() has noted
    that the recipe changes."""
    scale, what = stored.input_scale, "the scale of the input"
    if scale is None or source is None:
        return scale, []
    if not source.reads_scale:
        keeps = layout.calibrated and not layout.reads_scale
        return (scale, []) if keeps else (None, [Loss(name, f"{what}, which the layer does not use, has no place", 0)])
    if not has_other_amax(source.static, layout.static):
        return rescaled(name, what, scale, (_way(source.static), _way(layout.static)), _largest(source.static))
    found = of_same_amax(scale, source.static, layout.static)
    if not found.is_meta and not bool((found.isfinite() & (found > 0)).all()):
        raise CheckpointError(
            f"the static scale of x={source.static} must have one of the same amax for x={layout.static} that is "
            f"finite and positive; {scale.tolist()} gives {found.tolist()}",
            "calibrate the layer again (quire.calibrate) under the recipe of the file",
            tensor=name,
        )
    return found, []


#: What NVFP4 stores above the scales of blocks in a spec without the option `global`.
_AMAX = "amax"


def _way(spec: str) -> str:
    """Whether the scale above the scales of blocks is a factor, a divisor or an amax."""
    words = spec.split(":")
    return DIV if DIV in words else _AMAX if words[0] == "nvfp4" and MUL not in words else MUL


def _largest(spec: str) -> int:
    """The number by which an NVFP4 amax is divided (numerics.md 5.8)."""
    return 6 * (256 if "256" in spec.split(":") else 448)


def rescaled(
    name: str, what: str, scale: torch.Tensor, ways: tuple[str, str], largest: int
) -> tuple[torch.Tensor, list[Loss]]:
    """Converts a scale from the first way of storing it to the second: the scale, and what is lost. largest: the amax
    for which the factor is 1."""
    own, wanted = ways
    if own == wanted:
        return scale, []
    if own != _AMAX:
        return inverted(name, what, scale)
    # A value is code * (S * amax) / largest there and code * (S * factor) here, each rounded in its own way.
    all_of_it = torch.full_like(scale, largest)  # PyTorch would round a number's quotient twice
    factor = torch.where(scale == 0, 1.0, scale / all_of_it if wanted == MUL else all_of_it / scale)
    kind = "factor" if wanted == MUL else "divisor"
    text = (
        f"{what} is stored as an amax. The dialect stores a {kind}, with which values are rounded differently; a "
        f"weight quantized as nvfp4:{wanted} has such a {kind}"
    )
    return factor, [Loss(name, text, 1)]


def inverted(name: str, what: str, scale: torch.Tensor) -> tuple[torch.Tensor, list[Loss]]:
    """1 / scale, and a Loss if inverting it again does not give scale."""
    found = scale.reciprocal()
    if scale.is_meta:
        return found, []
    back = found.reciprocal()
    ulp = int((back.view(torch.int32).long() - scale.view(torch.int32).long()).abs().max())
    if ulp == 0:
        return found, []
    worst = scale[back != scale].reshape(-1)[0].item()
    return found, [Loss(name, f"{what} {worst!r} is stored inverted, and inverting it again is {ulp} ulp off", ulp)]
