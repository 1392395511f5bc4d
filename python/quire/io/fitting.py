"""Which entries of a checkpoint each parameter of a model is made of, and what a loaded model remembers of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.checks import describe
from quire.conversion.refit import named_layers, own_names, unwrapped
from quire.io.container import CheckpointError
from quire.io.reading import Checkpoint
from quire.nn.grouped_linear import GroupedLinear
from quire.nn.layernorm_mlp import LayerNormMLP
from quire.nn.moe import MoE
from quire.nn.product_module import ProductModule
from quire.nn.stacked_experts import StackedExperts, is_experts, weight_names
from quire.tensor.origin import Origin

#: What fuse=True joins: name of a layer of the model -> names of the layers in the file.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "kv_proj": ("k_proj", "v_proj"),
}
#: Names of an expert's layers in files: of the gate, of the other input, of the output.
_EXPERTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_ROUTERS = ("gate", "router")


def within(path: str, name: str) -> str:
    """The name, in the model, of something of the module at path; "" is the model itself."""
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class Ref:
    """An entry of a checkpoint, or one matrix of it."""

    entry: str
    index: int | None = None


@dataclass(frozen=True)
class Source:
    """What a parameter is made of: for each matrix the parts that are its rows. stacked: the parameter is [E, ...]."""

    matrices: tuple[tuple[Ref, ...], ...]
    stacked: bool = False

    def refs(self) -> list[Ref]:
        return [ref for matrix in self.matrices for ref in matrix]


@dataclass
class Target:
    """A parameter or buffer of a model. owners: (name of the module, module, attribute); several if it is tied. untied:
    it was tied to another parameter, and gets a separate value. same: entries under its other names that have the same
    bytes."""

    value: torch.Tensor
    owners: list[tuple[str, torch.nn.Module, str]]
    source: Source | None = None
    untied: bool = False
    same: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first of its names in the model."""
        return self.names()[0]

    @property
    def alternates(self) -> bool:
        """Whether its rows are rows of gate and up alternately."""
        _, module, attribute = self.owners[0]
        experts = is_experts(module) or isinstance(module, StackedExperts)
        return experts and not module.is_concatenated and attribute.startswith("gate_up_proj")

    def names(self) -> list[str]:
        return [within(path, attribute) for path, _, attribute in self.owners]


@dataclass(frozen=True)
class _Names:
    """Where entries belong. entries: name in the model -> name of the entry of the checkpoint. quantized: those entries
    that are. fused: of load(fuse=). experts: of load(experts=)."""

    entries: Mapping[str, str]
    quantized: Container[str]
    fused: Mapping[str, Sequence[str]]
    experts: str

    def first(self, sources: Sequence[Source] | Iterator[Source]) -> Source | None:
        """The first of sources, in names of the model, that the checkpoint has."""
        for source in sources:
            if all(ref.entry in self.entries for ref in source.refs()):
                matrices = tuple(tuple(Ref(self.entries[r.entry], r.index) for r in m) for m in source.matrices)
                return Source(matrices, source.stacked)
        return None


def fit(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    fuse: object,
    experts: str,
    rename: Callable[[str], str] | None = None,
) -> list[Target]:
    """All persistent parameters and buffers, each with its source, None if the checkpoint has none. rename: name in the
    checkpoint -> name in the model. Raises CheckpointError if two names of a tied parameter have sources with different
    bytes, or if two entries get one name."""
    fused = FUSED if fuse is True else dict(fuse or {})
    parents = dict(named_layers(model))
    found = {id(target): target for target in parameters(model)}
    names = _Names(_entries(checkpoint, rename, found.values()), checkpoint.groups, fused, experts)
    for target in list(found.values()):
        sources = [_source(owner, parents, names) for owner in target.owners]
        target.source = next((source for source in sources if source is not None), None)
        for owner, source in list(zip(target.owners, sources, strict=True)):
            apart = source is not None and source != target.source
            if apart and (untied := _untied(target, owner, source, checkpoint)):
                target.owners.remove(owner)
                found[id(untied)] = untied
            elif apart:
                target.same += [ref.entry for ref in source.refs()]
    return list(found.values())


def unjoined(
    targets: Sequence[Target], checkpoint: Checkpoint, fuse: object, rename: Callable[[str], str] | None
) -> list[str]:
    """Of targets that fit() found no source for: what fuse= would join, and which of its parts the checkpoint lacks. A
    phrase for each kind of layer of which the checkpoint has a part."""
    fused, entries = FUSED if fuse is True else dict(fuse or {}), _entries(checkpoint, rename, targets)
    found: dict[str, str] = {}
    missing = [target for target in targets if target.source is None]
    for path, _, attribute in (owner for target in missing for owner in target.owners):
        outer, _, last = path.rpartition(".")
        parts = fused.get(last, ())
        lacking = [part for part in parts if within(outer, f"{part}.{attribute}") not in entries]
        if len(lacking) < len(parts):
            what = f"{last} is joined only of all of {', '.join(parts)}"
            found.setdefault(last, f"{what}, and the checkpoint has no {within(outer, f'{lacking[0]}.{attribute}')}")
    return list(found.values())


def _entries(checkpoint: Checkpoint, rename: Callable[[str], str] | None, targets: Iterable[Target]) -> dict[str, str]:
    """Name in the model -> entry of the checkpoint. A bias belongs to its layer's entry. targets: all of the model."""
    renamed: dict[str, str] = {}
    for entry in (*checkpoint.groups, *checkpoint.plain, *checkpoint.biases):
        renamed[entry] = entry if rename is None else rename(entry)
        if not isinstance(renamed[entry], str):
            raise TypeError(f"quire.io.load: rename must return a str, got {describe(renamed[entry])} for {entry!r}")
    own = own_names([*renamed.values()], [name for target in targets for name in target.names()])
    found: dict[str, str] = {}
    for entry, other in renamed.items():
        name = own[other]
        if found.setdefault(name, entry) != entry:
            raise CheckpointError(
                f"{found[name]} and {entry} are both renamed to {name}", "rename them apart", tensor=entry
            )
    return found


def parameters(model: torch.nn.Module) -> list[Target]:
    """All persistent parameters and buffers, without sources."""
    found: dict[int, Target] = {}
    for path, module in named_layers(model):
        for attribute, value in _tensors(module):
            target = found.setdefault(id(value), Target(value, []))
            target.owners.append((path, module, attribute))
    return list(found.values())


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    transient = {*module._non_persistent_buffers_set}  # the only place where PyTorch says so
    if isinstance(module, ProductModule):
        transient.update(module.input_scales())  # which belong to entries of weights
    yield from ((name, value) for name, value in module._parameters.items() if value is not None)
    yield from ((n, value) for n, value in module._buffers.items() if value is not None and n not in transient)


def _untied(
    target: Target, owner: tuple[str, torch.nn.Module, str], source: Source, checkpoint: Checkpoint
) -> Target | None:
    """For a tied parameter that the file has under two names: None if both entries are equal; a separate target if one
    of them is quantized."""
    first, second = target.source.refs()[0].entry, source.refs()[0].entry
    if first in checkpoint.groups or second in checkpoint.groups:
        return Target(target.value, [owner], source, untied=True)
    one, other = checkpoint[first], checkpoint[second]
    if one.dtype != other.dtype or one.shape != other.shape or not _same(one, other):
        raise CheckpointError(
            f"the model ties the parameter to {first}, and the file has other values there",
            "untie the model's parameters, or choose the checkpoint of this model",
            file=checkpoint.container.header[second].file,
            tensor=second,
        )
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _source(
    owner: tuple[str, torch.nn.Module, str], modules: Mapping[str, torch.nn.Module], names: _Names
) -> Source | None:
    path, module, attribute = owner
    if is_experts(module) or isinstance(module, StackedExperts):
        return names.first(_of_stacked(path, module, attribute, names))
    if whole := names.first([Source(((Ref(within(path, attribute)),),))]):
        return whole
    outer, _, last = path.rpartition(".")
    mixture = modules.get(outer)
    if isinstance(mixture, MoE) or isinstance(module, MoE):
        found = _of_mixture(outer if isinstance(mixture, MoE) else path, last, module, attribute)
        return names.first(found)
    if isinstance(module, LayerNormMLP):
        return names.first(_of_mlp(path, module, attribute))
    if isinstance(module, GroupedLinear) and names.experts != "none":
        return names.first(_of_groups(path, module, attribute))
    if last in names.fused:
        each = names.fused[last]
        parts = tuple(Ref(within(outer, f"{part}.{attribute}")) for part in each)
        return names.first([Source((parts,))])
    return None


def _of_mixture(outer: str, last: str, module: torch.nn.Module, attribute: str) -> Iterator[Source]:
    """The names that files have for a part of a MoE at `outer`."""
    if last == "router":
        yield from (Source(((Ref(within(outer, f"{name}.{attribute}")),),)) for name in _ROUTERS)
    elif attribute == "expert_bias":
        yield from (Source(((Ref(within(outer, f"{name}.e_score_correction_bias")),),)) for name in _ROUTERS)
    elif last in ("fc1", "fc2"):
        yield from _experts(outer, last, module, attribute)
    elif last in ("shared_fc1", "shared_fc2"):
        for where in ("shared_experts", "shared_expert"):
            for parts in _layers(last[-1]):
                yield Source((tuple(Ref(within(outer, f"{where}.{part}.{attribute}")) for part in parts),))


def _layers(number: str) -> list[tuple[str, ...]]:
    """Of fc1 or fc2, the layers whose rows it has. One without a gate has only the second."""
    if number == "2":
        return [(down,) for _, _, down in _EXPERTS]
    return [(gate, up) for gate, up, _ in _EXPERTS] + [(up,) for _, up, _ in _EXPERTS] + [("w1",)]


def _experts(outer: str, last: str, module: GroupedLinear, attribute: str) -> Iterator[Source]:
    kind, stacked = attribute.rstrip("0123456789"), attribute in ("weight", "bias")
    numbers = list(module.own_groups()) if stacked else [int(attribute.removeprefix(kind))]
    for parts in _layers(last[-1]):
        each = [tuple(Ref(within(outer, f"experts.{e}.{part}.{kind}")) for part in parts) for e in numbers]
        yield Source(tuple(each), stacked)
    name = within(outer, f"experts.{'gate_up_proj' if last == 'fc1' else 'down_proj'}")
    whole = name if kind == "weight" else f"{name}_bias"
    yield Source(tuple((Ref(whole, e),) for e in numbers), stacked)


def _of_stacked(path: str, module: torch.nn.Module, attribute: str, names: _Names) -> Iterator[Source]:
    """Experts as transformers has them: a file has them in one tensor too, or experts.0.gate_proj and so on."""
    full, each = within(path, attribute), range(module.num_experts)
    if attribute in weight_names(module) and names.entries.get(full) in names.quantized:
        yield Source(tuple((Ref(full, e),) for e in each), stacked=True)
    yield Source(((Ref(full),),))
    kind = "bias" if attribute.endswith("_bias") else "weight"
    of_expert = attribute.removesuffix("_bias")
    # Alternating rows of gate and up are never joined from two layers.
    parts = [] if of_expert == "gate_up_proj" and not module.is_concatenated else _expert_layers(of_expert)
    for layers in parts if names.experts != "none" else ():
        refs = [tuple(Ref(within(path, f"{e}.{layer}.{kind}")) for layer in layers) for e in each]
        yield Source(tuple(refs), stacked=True)


def _expert_layers(name: str) -> list[tuple[str, ...]]:
    """For a tensor of all experts: the layers of one expert in a file that it consists of."""
    kinds = {"gate_up_proj": slice(0, 2), "up_proj": slice(1, 2), "down_proj": slice(2, 3)}
    return [of[kinds[name]] for of in _EXPERTS] if name in kinds else []


def named_in_files(target: Target, modules: Mapping[str, torch.nn.Module], stacks: bool) -> Source | None:
    """Under which names files of other tools have a parameter of a layer of quire with several weights, such that
    load() finds them; None for its own name. stacks: whether they have all experts in one tensor."""
    path, module, attribute = target.owners[0]
    outer, _, last = path.rpartition(".")
    mixture = modules.get(outer)
    if isinstance(mixture, MoE) or isinstance(module, MoE):
        outer, mixture = (outer, mixture) if isinstance(mixture, MoE) else (path, module)
        gated = mixture.fc1.out_features > mixture.ffn_hidden_size
        count = 2 if last in ("fc1", "shared_fc1") and gated and not (stacks and last == "fc1") else 1
        whole = stacks and last in ("fc1", "fc2")
        each = _of_mixture(outer, last, module, attribute)
        return next((s for s in each if len(s.matrices[0]) == count and (s.refs()[0].index is not None) == whole), None)
    if isinstance(module, LayerNormMLP):
        return next(_of_mlp(path, module, attribute), None)
    if isinstance(module, GroupedLinear):
        return next(s for s in _of_groups(path, module, attribute) if (s.refs()[0].index is not None) == stacks)
    return None


def _of_mlp(path: str, module: LayerNormMLP, attribute: str) -> Iterator[Source]:
    """Each of the two weights as that of a layer."""
    for product in module.products:
        for kind in ("weight", "bias"):
            if attribute == f"{product}_{kind}":
                yield Source(((Ref(within(path, f"{product}.{kind}")),),))


def _of_groups(path: str, module: GroupedLinear, attribute: str) -> Iterator[Source]:
    """A GroupedLinear at `experts` has layers experts.0, ...; or at experts.up_proj, of experts.0.up_proj, ..."""
    kind, stacked = attribute.rstrip("0123456789"), attribute in ("weight", "bias")
    numbers = list(module.own_groups()) if stacked else [int(attribute.removeprefix(kind))]
    outer, _, last = path.rpartition(".")
    yield Source(tuple((Ref(within(path, f"{e}.{kind}")),) for e in numbers), stacked)
    yield Source(tuple((Ref(within(outer, f"{e}.{last}.{kind}")),) for e in numbers), stacked)
    # The entry of all matrices has the name of the layer; that of a layer which is the model is its own.
    whole = f"{path}{'' if kind == 'weight' else '_bias'}" if path else kind
    yield Source(tuple((Ref(whole, e),) for e in numbers), stacked)


# --- what a model remembers of the checkpoint that it was loaded from, so that it can be saved again


_ATTRIBUTE = "_quire_checkpoint"


@dataclass
class Record:
    """path, dialect, configs: of the checkpoint. sources: name of a parameter -> the entries that it was made of, and
    the rows of each. layouts, input_scales: name of a quantized weight in the checkpoint -> name of its layout, static
    scale of its input. dtypes: of plain entries. other: entries from which no parameter was made and that files need,
    such as scales of caches."""

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
    vars(unwrapped(model))[_ATTRIBUTE] = record


def record_of(model: torch.nn.Module) -> Record | None:
    """What the model remembers; None for a model that quire.io has not loaded."""
    found = vars(unwrapped(model)).get(_ATTRIBUTE)
    return found if isinstance(found, Record) else None


def forget(model: torch.nn.Module) -> None:
    """To be called when the model is no longer that of the checkpoint."""
    vars(unwrapped(model)).pop(_ATTRIBUTE, None)
