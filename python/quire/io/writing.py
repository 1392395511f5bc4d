"""A mapping of layers and tensors, written as a checkpoint of a dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quire.checks import check_type
from quire.io.dialect import Dialect
from quire.io.dialects import dialect_named
from quire.io.errors import CheckpointError
from quire.io.layout import Group, Layout
from quire.io.reading import Checkpoint
from quire.io.shards import divided, nbytes, replaced, size_of, write_json, write_shards
from quire.io.stored import StoredWeight
from quire.io.translating import Loss, chosen_layout, translated

Tensors = Mapping[str, StoredWeight | torch.Tensor]


@dataclass(frozen=True)
class SaveReport:
    """What was written. files: names. layers: quantized ones. losses: what differs from the source, empty with
    exact=True; notes: what a reader of the new file should know."""

    files: tuple[str, ...]
    layers: int
    tensors: int
    nbytes: int
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.layers} quantized layers, {self.tensors} tensors, {self.nbytes} bytes in {len(self.files)} files"
        ]
        return "\n".join([*lines, *map(str, self.losses), *self.notes])


@dataclass
class Plan:
    """How each entry is written. layouts: name of a quantized weight -> its layout in the new file."""

    dialect: Dialect | None
    exact: bool
    layouts: dict[str, Layout] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def tensors(self, name: str, value: StoredWeight | torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of an entry by their names in the file."""
        if isinstance(value, torch.Tensor):
            return {name: value}
        if self.dialect is None:
            raise CheckpointError(
                "the layer is quantized, and no dialect says how to write it", "pass dialect=", tensor=name
            )
        layout = self.layouts[name]
        value, losses = translated(name, value, layout, self.dialect.name)
        if losses and self.exact:
            raise CheckpointError(
                f"{self.dialect.name} cannot store the layer exactly: {losses[0].what}",
                "pass exact=False (--allow-ulp) to accept this",
                tensor=name,
            )
        self.losses.extend(losses)
        return self.dialect.write(name, value, layout)


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

    path: a folder. tensors: name -> StoredWeight, under the name of the weight as a parameter, or tensor; such as
        read() returns. What was read from the same dialect gets the same names, dtypes, shapes and bytes.
    dialect: name; None if nothing is quantized. config: of the model (config.json), to which the dialect adds what it
        says of layers; or name of a file -> content, written unchanged; None: what `tensors` was read with.
    exact: raise CheckpointError if the dialect cannot store a layer such that converting it back gives the same bytes.
    max_shard_size: bytes, or a text such as "5GB". overwrite: replace a checkpoint that the folder has.

    Raises CheckpointError before anything is written, or after the parts written so far were removed.
    """
    check_type("quire.io.write", Mapping, tensors=tensors)
    plan = Plan(None if dialect is None else dialect_named(dialect), exact)
    most, meta, shapes = size_of(max_shard_size), {}, {}
    for name in tensors:
        outline = tensors.outline(name) if isinstance(tensors, Checkpoint) else outlined(name, tensors[name])
        if isinstance(outline, StoredWeight) and plan.dialect is not None:
            plan.layouts[name] = chosen_layout(name, outline, plan.dialect, plan.notes)
        meta[name], shapes[name] = plan.tensors(name, outline), tuple(outline.shape)
    shards = divided(meta.items(), most)
    configs = _configs(plan, tensors, config, shapes)
    with replaced(Path(path), overwrite) as folder:
        metadata = tensors.container.metadata if isinstance(tensors, Checkpoint) else {}
        files = write_shards(folder, shards, lambda name: plan.tensors(name, tensors[name]), metadata)
        for file, content in configs.items():
            write_json(folder / file, content)
            files.append(folder / file)
    count, size = sum(map(len, meta.values())), sum(nbytes(t) for each in meta.values() for t in each.values())
    names = tuple(file.name for file in files)
    return SaveReport(names, len(plan.layouts), count, size, tuple(plan.losses), tuple(dict.fromkeys(plan.notes)))


def outlined(name: str, value: object) -> StoredWeight | torch.Tensor:
    """An entry on the meta device. Raises TypeError for what is none."""
    if isinstance(value, StoredWeight):
        beside = [None if t is None else t.to("meta") for t in (value.input_scale, value.bias)]
        origin = value.origin
        return StoredWeight(value.weight.to("meta"), *beside, origin)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"quire.io.write: {name} must be a StoredWeight or a plain tensor, got {type(value).__name__}; a "
            "QuantizedTensor needs an origin, StoredWeight(weight, None, None, Origin(dialect, layout))"
        )
    return value.detach().to("meta")


def _configs(
    plan: Plan, tensors: Tensors, config: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Name of a file -> content."""
    if config is not None and config and all(str(name).endswith(".json") for name in config):
        return dict(config)
    source = tensors if isinstance(tensors, Checkpoint) else None
    base = dict(source.container.configs) if source is not None else {}
    if config is not None:
        base["config.json"] = dict(config)
    if plan.dialect is None or (config is None and _unchanged(plan, source)):
        return base
    plain = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name not in plan.layouts and name.endswith(".weight") and len(shape) == 2
    ]
    groups = [Group(name, layout, shapes[name], {}) for name, layout in plan.layouts.items()]
    return plan.dialect.config(groups, plain, base)


def _unchanged(plan: Plan, source: Checkpoint | None) -> bool:
    if source is None or source.dialect is None or source.dialect.name != plan.dialect.name:
        return False
    return {name: group.layout for name, group in source.groups.items()} == plan.layouts


def copied(source: Path, target: Path, written: Callable[[str], bool]) -> list[str]:
    """Copies the small files beside the weights, such as the tokenizer's, which say nothing of layers."""
    found = []
    for file in sorted(source.iterdir()):
        kinds = (".json", ".txt", ".model", ".jinja", ".md", ".py", ".tiktoken")
        if file.is_file() and file.suffix in kinds and not written(file.name):
            (target / file.name).write_bytes(file.read_bytes())
            found.append(file.name)
    return found
