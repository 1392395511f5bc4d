"""Which of the weights that somebody gives belong to which tensor of a model, and in which form they have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quire.conversion.held import Untied
from quire.conversion.report import conversion_report
from quire.distributed.experts import ExpertGroup
from quire.distributed.parallel import Parallel
from quire.distributed.pieces import PiecesOfTensor, PlainPart
from quire.distributed.placements import is_dtensor
from quire.nn.grouped_linear import GroupedLinear
from quire.nn.product_module import ProductModule
from quire.nn.sharded_module import ShardedModule
from quire.nn.stacked_experts import StackedExperts
from quire.nn.training_state import WRAPPERS
from quire.tensor import QuantizedTensor

#: The ends of names under which modules keep what is no weight: layers of FP8 (_extra_state), and AveragedModel.
_EXTRA, _COUNT = "_extra_state", "n_averaged"
#: Before all names of a model that DistributedDataParallel or AveragedModel wraps.
_WRAPPED = "module."


class Owner(NamedTuple):
    """A module that has a tensor as an attribute. path: its name in state dicts."""

    path: str
    module: torch.nn.Module
    attribute: str

    def named(self, attribute: str) -> str:
        """The name in state dicts of an attribute of the module."""
        return f"{self.path}.{attribute}" if self.path else attribute


@dataclass
class Slot:
    """A parameter or persistent buffer of a model, under all of its names. scale: whether it is a static scale of
    inputs, which weights need not have."""

    tensor: torch.Tensor
    scale: bool
    owners: list[Owner] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [owner.named(owner.attribute) for owner in self.owners]


class Write(NamedTuple):
    """A value that is to be written. target: a tensor of the model, or one matrix of it. key: of the value in the
    weights. part: what belongs to the target, of that value."""

    name: str
    target: torch.Tensor
    key: str
    part: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Match:
    """writes: in the model's order. missing: names of tensors, and of matrices, that the weights do not have. unused:
    names of weights that the model does not have, or has from another key already. twice: names of tied weights -> the
    keys under which they are given.
    """

    writes: list[Write]
    missing: list[str]
    unused: list[str]
    twice: dict[str, list[str]]


def plain_name(name: str) -> str:
    """A name in a state dict without the names of modules that wrap others."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def slots(model: torch.nn.Module) -> list[Slot]:
    """All parameters and persistent buffers."""
    found: dict[int, Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        scales = module.input_scales() if isinstance(module, ProductModule) else ()
        transient = module._non_persistent_buffers_set  # the only place where PyTorch says so
        buffers = {name: value for name, value in module._buffers.items() if name not in transient}
        for name, value in (*module._parameters.items(), *buffers.items()):
            if value is not None and name != _COUNT:
                slot = found.setdefault(id(value), Slot(value, name in scales))
                slot.owners.append(Owner(plain_name(path), module, name))
    return list(found.values())


def match(model: torch.nn.Module, weights: Mapping[str, object]) -> Match:
    """Finds for each tensor of the model its value among the weights, by name. Nothing is read."""
    aliases, own_slots = _aliases(model), slots(model)
    given = _by_name(weights, [name for slot in own_slots for name in slot.names])
    writes, missing, twice, used = [], [], {}, set()
    for slot in own_slots:
        own, lacking = _of_slot(slot, given, aliases)
        writes += own
        missing += [] if slot.scale else lacking
        present = [given[name] for name in slot.names if name in given]
        used.update(present, (write.key for write in own), _of_other_ranks(slot, given))
        if len(present) > 1:
            twice[slot.names[0]] = present
    unused = [key for key in weights if key not in used and not key.endswith((_EXTRA, _COUNT))]
    return Match(writes, missing, unused, twice)


def _by_name(weights: Iterable[str], own: Sequence[str]) -> dict[str, str]:
    """The model's name of each weight -> its key. own: the names of the model's tensors."""
    names = {key: plain_name(key) for key in weights if not key.endswith(_COUNT)}
    theirs, ours = (all(name.startswith(_WRAPPED) for name in each) for each in (names.values(), own))
    given: dict[str, str] = {}
    for key, name in names.items():
        if theirs != ours:
            name = name.removeprefix(_WRAPPED) if theirs else _WRAPPED + name
        given.setdefault(name, key)
    return given


def _aliases(model: torch.nn.Module) -> dict[str, list[str]]:
    """Name of a weight that a conversion has untied -> the other names: files have tied weights once."""
    try:
        untied: tuple[Untied, ...] = conversion_report(model).untied
    except ValueError:
        return {}
    return {
        plain_name(name): [plain_name(other) for other in (*one.others, *one.quantized)]
        for one in untied
        for name in one.quantized
    }


def _of_slot(slot: Slot, given: Mapping[str, str], aliases: Mapping[str, list[str]]) -> tuple[list[Write], list[str]]:
    """What is to be written to a tensor, and names of what is missing."""
    others = [other for name in slot.names for other in aliases.get(name, ())]
    for name in (*slot.names, *others):
        if name in given:
            return [Write(slot.names[0], slot.tensor, given[name], _whole(slot))], []
    for owner in slot.owners:
        if isinstance(owner.module, GroupedLinear) and not slot.scale:
            writes, lacking = _of_groups(slot, owner, given)
            if writes:
                return writes, lacking
    return [], [slot.names[0]]


def _whole(slot: Slot) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: _fitted(slot.tensor, slot.owners[0], value)


def _fitted(target: torch.Tensor, owner: Owner, value: torch.Tensor) -> torch.Tensor:
    """The part of a value that a tensor of the model has: all of it, or that of this rank."""
    value = _unwrapped(value)
    module = owner.module
    if isinstance(module, StackedExperts) and isinstance(target, QuantizedTensor) and value.dim() == 3:
        value = module.as_stored(value)
    if value.shape == target.shape:
        return value
    if is_dtensor(value) and not is_dtensor(target) and value.to_local().shape == target.shape:
        return value.to_local()
    sharding = module.own_parts().get(owner.attribute) if isinstance(module, ShardedModule) else None
    if isinstance(sharding, ExpertGroup) and len(value) == sharding.num_experts:
        return value[sharding.own().start : sharding.own().stop]
    if isinstance(sharding, Parallel) and value.dim() <= 2 and not isinstance(value, QuantizedTensor):
        return sharding.part_of(value, bias=value.dim() == 1)
    return value


def _unwrapped(value: torch.Tensor) -> torch.Tensor:
    """What torch.distributed.checkpoint or a state dict of a sharded layer has, as the plain shard."""
    value = value.given if isinstance(value, PiecesOfTensor) else value
    return value.plain() if isinstance(value, PlainPart) else value


# --- a GroupedLinear has one weight for all groups or one for each, and the weights may have the other form


def _of_groups(slot: Slot, owner: Owner, given: Mapping[str, str]) -> tuple[list[Write], list[str]]:
    module, kind = owner.module, owner.attribute.rstrip("0123456789")
    own, number = module.own_groups(), owner.attribute.removeprefix(kind)
    if number:
        key = given.get(owner.named(kind))
        part = _one_of(module, int(number))
        return ([Write(slot.names[0], slot.tensor, key, part)] if key is not None else []), []
    writes, lacking = [], []
    for index, group in enumerate(own):
        name = owner.named(f"{kind}{group}")
        if name in given:
            writes.append(Write(name, _matrix(slot.tensor, index), given[name], _unwrapped))
        else:
            lacking.append(name)
    return writes, lacking


def _one_of(module: GroupedLinear, group: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Takes the value of a group from that of all groups, or of those that this rank has."""

    def part(value: torch.Tensor) -> torch.Tensor:
        value, own = _unwrapped(value), module.own_groups()
        first = {module.num_gemms: 0, len(own): own.start}.get(len(value) if value.dim() else 0)
        return value if first is None else value[group - first]  # of another size: whole, for the error of its shape

    return part


def _matrix(stack: torch.Tensor, index: int) -> torch.Tensor:
    """The part of a tensor of all groups that belongs to one of them, in the same memory."""
    return stack.part(index) if isinstance(stack, QuantizedTensor) else stack.detach()[index]


def _of_other_ranks(slot: Slot, given: Mapping[str, str]) -> Iterator[str]:
    """Keys of values that belong to groups of tokens which other ranks have."""
    for owner in slot.owners:
        if isinstance(owner.module, GroupedLinear) and owner.module.expert_group is not None:
            kind = owner.attribute.rstrip("0123456789")
            names = (owner.named(f"{kind}{group}") for group in range(owner.module.num_gemms))
            yield from (given[name] for name in names if name in given)
