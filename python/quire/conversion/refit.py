"""New weights for a model that was converted for inference, in the memory of its present ones: which of the weights
that somebody gives belong to which tensor, whether they fit, and how they are written."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.checks import check_type, counted, describe
from quire.conversion.held import Untied
from quire.conversion.report import conversion_report, megabytes
from quire.distributed.experts import ExpertGroup
from quire.distributed.parallel import Parallel
from quire.distributed.pieces import PiecesOfTensor, PlainPart
from quire.distributed.placements import is_dtensor, local, part_for
from quire.nn.grouped_linear import GroupedLinear
from quire.nn.own_context import own_context
from quire.nn.product_module import SCALE_SPEC, ProductModule
from quire.nn.stacked_experts import StackedExperts
from quire.nn.training_state import WRAPPERS
from quire.tensor import DTYPES, QuantizedTensor
from quire.tensor.order import same_codes

#: (model, path) -> the weights of a checkpoint by their names in the model. The root of the package puts it here:
#: quire.io, which reads files, stands above this folder and is loaded when it is first used.
OPENERS: list[Callable[[torch.nn.Module, str | Path], Mapping[str, torch.Tensor]]] = []


@dataclass(frozen=True)
class RefitReport:
    """The result of quire.refit. str() gives a summary.

    Attributes:
        quantized: names of weights whose values were quantized.
        copied: names of weights whose codes were copied.
        plain: names of parameters and buffers in high precision that were copied.
        left: names in the model that kept their values (without static scales).
        unused: names that only the weights have.
        nbytes: bytes that were written.
        notes: what to do before the model runs.
    """

    quantized: tuple[str, ...]
    copied: tuple[str, ...]
    plain: tuple[str, ...]
    left: tuple[str, ...]
    unused: tuple[str, ...]
    nbytes: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        kinds = ((self.quantized, "quantized"), (self.copied, "copied as codes"), (self.plain, "in high precision"))
        written = ", ".join(f"{len(names)} {what}" for names, what in kinds)
        lines = [f"refit: {megabytes(self.nbytes)} written: {written}"]
        lines += [f"  left: {_some(self.left)}"] if self.left else []
        lines += [f"  unused: {_some(self.unused)}"] if self.unused else []
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def refit(
    model: torch.nn.Module,
    weights: Mapping[str, torch.Tensor] | str | Path,
    *,
    strict: bool = True,
    check_finite: bool = True,
) -> RefitReport:
    """Quantizes new weights into the memory of a model that was converted for inference. Returns what was written.

    All tensors of the model stay the same objects at the same addresses, with their specs and order of codes. So
    compiled functions are not compiled again, captured CUDA graphs stay valid, and what shares the memory
    computes with the new weights. The bytes are those of a new conversion: of the model's layers with the weights
    loaded, under the same recipe. Static scales of inputs stay, unless the weights have some.

    Everything is checked before anything is written: names, shapes, dtypes, specs and values. Then one tensor at a time
    is quantized, in temporary memory of its codes, and written. If that memory runs out, the error has a note that
    names the tensor: the model then has new weights up to there and old ones behind, and must be refitted again. No
    call of the model may run at the same time.

    Args:
        model: a model with quantized weights (quire.convert(for_inference=True), quire.quantize_model, quire.io.load,
            quire.quantized_model_init), or the module of an exported program of one.
        weights: the state dict of the unconverted model, or a part of it; or the path of a checkpoint, as for
            quire.io.read. A value in float32, float16 or bfloat16 is rounded to the dtype of the model's parameter, as
            load_state_dict does, and quantized; if the parameter has a master, that takes it unrounded. Of a
            QuantizedTensor with the same spec, the bytes are copied. Of a DTensor, ranks send their parts, one tensor
            at a time; all ranks of its mesh must call this function. A layer that is sharded over ranks takes its own
            part, or the whole value. Experts may be stacked in one tensor or listed, whichever form the model has. No
            value may lie in the memory of another weight of the model that is written. Names may begin with "module.",
            as those of DistributedDataParallel.
        strict: raise ValueError if the model or the weights have a name that the other does not have. False: write what
            is given, such as a few experts.
        check_finite: raise ValueError for values in high precision that are NaN or infinite, or become infinite when
            they are rounded to the model's dtype. False saves one pass over the values. Codes are not checked.

    Returns:
        A RefitReport, whose str() is a summary. Attributes: quantized, copied and plain (names of what was written),
        left and unused (names that one side lacks), nbytes (bytes written), notes (what to do before the model runs).

    Raises:
        ValueError: for a rule that is broken, and for values if the codes were made by quire.quantize_model with
            another method than "rtn", since a refit rounds to nearest; codes are taken. The model is then unchanged.
        TypeError: for arguments of a wrong type.
        quire.io.CheckpointError: for a damaged checkpoint.
    """
    check_type("refit", torch.nn.Module, model=model)
    check_type("refit", bool, strict=strict, check_finite=check_finite)
    if isinstance(weights, str | Path):
        weights = OPENERS[0](model, weights)
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"refit: weights must be a state dict or the path of a checkpoint, got {describe(weights)}; "
            "of a model pass .state_dict()"
        )
    for name in weights:
        check_type("refit", str, **{"a key of weights": name})
    _check_model(model)
    with own_context():
        found = match(model, weights)
        _check(model, found, weights, strict, check_finite)
        written = _write(found.writes, weights)
    names = [write.name for write in found.writes]
    left = tuple(found.missing)
    by_kind = {kind: tuple(n for n, (k, _) in zip(names, written, strict=True) if k == kind) for kind in _KINDS}
    nbytes = sum(size for _, size in written)
    return RefitReport(*by_kind.values(), left, tuple(found.unused), nbytes, tuple(_notes(model, found.writes)))


# --- which weights belong to which tensor, and in which form

#: The ends of names under which modules keep what is no weight: layers of FP8 (_extra_state), and AveragedModel.
_EXTRA, _COUNT = "_extra_state", "n_averaged"
#: What has a model as its `module`, and "module." before all names.
_HOLDERS = (
    torch.nn.parallel.DistributedDataParallel,
    torch.nn.DataParallel,
    torch.optim.swa_utils.AveragedModel,
)
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


#: The addresses of a tensor's first byte and of that behind its last one.
Span = tuple[int, int]


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


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model within what torch.compile, DistributedDataParallel and their like return for it."""
    while isinstance(model, _HOLDERS) or [*model._modules] in [[name] for name in WRAPPERS]:
        model = model.module if isinstance(model, _HOLDERS) else next(model.children())
    return model


def named_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module, under all of its names in state dicts of the model that nothing wraps."""
    for path, module in unwrapped(model).named_modules(remove_duplicate=False):
        yield plain_name(path), module


def slots(model: torch.nn.Module) -> list[Slot]:
    """All parameters and persistent buffers."""
    found: dict[int, Slot] = {}
    for path, module in named_layers(model):
        scales = module.input_scales() if isinstance(module, ProductModule) else ()
        transient = module._non_persistent_buffers_set  # the only place where PyTorch says so
        buffers = {name: value for name, value in module._buffers.items() if name not in transient}
        for name, value in (*module._parameters.items(), *buffers.items()):
            if value is not None and name != _COUNT:
                slot = found.setdefault(id(value), Slot(value, name in scales))
                slot.owners.append(Owner(path, module, name))
    return list(found.values())


def match(model: torch.nn.Module, weights: Mapping[str, object]) -> Match:
    """Finds for each tensor of the model its value among the weights, by name. Nothing is read."""
    own_slots = slots(model)
    names = [name for slot in own_slots for name in slot.names]
    aliases, given = _aliases(model, names), _by_name(weights, names)
    writes, missing, twice, used = [], [], {}, set()
    for slot in own_slots:
        own, lacking = _of_slot(slot, given, aliases)
        writes += [_converted(write, slot, weights) for write in own] if slot.scale else own
        missing += [] if slot.scale else lacking
        present = [given[name] for name in slot.names if name in given]
        used.update(present, (write.key for write in own), _of_other_ranks(slot, given))
        if len(present) > 1:
            twice[slot.names[0]] = present
    unused = [key for key in weights if key not in used and not key.endswith((_EXTRA, _COUNT))]
    return Match(writes, missing, unused, twice)


def _by_name(weights: Iterable[str], own: Sequence[str]) -> dict[str, str]:
    """The model's name of each weight -> its key. own: the names of the model's tensors."""
    given: dict[str, str] = {}
    for key, name in own_names([key for key in weights if not key.endswith(_COUNT)], own).items():
        given.setdefault(name, key)
    return given


def own_names(keys: Sequence[str], own: Sequence[str]) -> dict[str, str]:
    """Name of a weight, perhaps of a wrapped model -> the model's name of it. own: the names of the model's tensors."""
    names = {key: plain_name(key) for key in keys}
    theirs, ours = (all(name.startswith(_WRAPPED) for name in each) for each in (names.values(), own))
    if theirs == ours:
        return names
    return {key: name.removeprefix(_WRAPPED) if theirs else _WRAPPED + name for key, name in names.items()}


def _aliases(model: torch.nn.Module, own: Sequence[str]) -> dict[str, list[str]]:
    """Name of a weight that a conversion has untied -> the other names: files have tied weights once. own: the names of
    the model's tensors. The model may have been wrapped when it was converted, or only now."""
    try:
        untied: tuple[Untied, ...] = conversion_report(model).untied
    except ValueError:
        return {}
    names = own_names([name for one in untied for name in (*one.others, *one.quantized)], own)
    return {
        names[name]: [names[other] for other in (*one.others, *one.quantized)]
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


def _converted(write: Write, slot: Slot, weights: Mapping[str, object]) -> Write:
    """The write of a static scale, as the one of the same amax for the model's layer."""
    about = getattr(weights, "_metadata", {}).get(write.key.rpartition(".")[0], {})
    owner = slot.owners[0].module
    return write._replace(part=lambda value: owner.own_scale(write.part(value), about.get(SCALE_SPEC)))


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
    sharding = module.own_parts().get(owner.attribute) if isinstance(module, ProductModule) else None
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


# --- before anything is written


def _check_model(model: torch.nn.Module) -> None:
    each = [slot.tensor for slot in slots(model)]
    codes = [t for t in each if isinstance(t, QuantizedTensor)]
    if not codes and isinstance(model, torch.fx.GraphModule):
        raise ValueError(
            "refit: this graph has no quantized weights, as a program after run_decompositions(): refit the model that "
            "it was made of, whose memory it shares, or program.module() before run_decompositions()"
        )
    if not codes:
        raise ValueError(
            f"refit: {type(model).__name__} has no quantized weights; convert it first, with quire.convert(..., "
            "for_inference=True), or load plain weights by load_state_dict(); the weights of runners are written by "
            "quire.runners.refit"
        )
    if any(t.is_meta for t in each):
        raise ValueError("refit: the model has tensors on the meta device, which have no memory; load it first")
    for slot in slots(model):
        if not isinstance(slot.tensor, QuantizedTensor) and _overlaps(local(slot.tensor)):
            raise ValueError(
                f"refit: elements of {slot.names[0]} share memory (strides {slot.tensor.stride()}), so they cannot be "
                "written; give the model a contiguous tensor"
            )
    for t in codes:
        t.check_writable()


def _check(
    model: torch.nn.Module, found: Match, weights: Mapping[str, torch.Tensor], strict: bool, check_finite: bool
) -> None:
    """Raises ValueError unless all writes can be done."""
    problems = _wrong_names(found) if strict else []
    if not found.writes:
        problems.append("the model has none of the names")
    meshes: list[Any] = []
    method, of_values, moved = _method(model), {}, []
    for write in found.writes:
        value = weights[write.key]
        if why := _why_not(write, value, check_finite, method):
            of_values.setdefault(why, {})[write.key] = None
        if (spans := _spans(value)) != _spans(write.target):
            moved.append((write, spans))
        if is_dtensor(value) and value.device_mesh not in meshes:
            meshes.append(value.device_mesh)
    problems += [f"{_some([*keys])}: {'each ' * (len(keys) > 1)}{why}" for why, keys in of_values.items()]
    problems += dict.fromkeys(_shared(moved))
    problems += [
        f"{name} is tied in the model, and its names {', '.join(keys)} have different values"
        for name, keys in found.twice.items()
        if not all(_same(weights[keys[0]], weights[key]) for key in keys[1:])
    ]
    elsewhere = _refused_elsewhere(bool(problems), meshes)
    if problems or elsewhere:
        said = "; ".join(problems[:_SHOWN]) if problems else "another rank refuses its weights"
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        remedy = f". {_REMEDY}" if strict and (found.missing or found.unused) else ""
        raise ValueError(f"refit: nothing was written: {said}{more}{remedy}")


#: How many problems an error names.
_SHOWN = 5
_REMEDY = (
    "Pass the state dict of the unconverted model; for a weight that PyTorch computes (weight_norm, prune), its value: "
    "{name: layer.weight}. Or pass strict=False, which writes what both have"
)


def _shared(moved: Sequence[tuple[Write, Sequence[Span]]]) -> Iterator[str]:
    """What is wrong with values that lie in the memory of other tensors that are written. moved: the writes of other
    values than the tensor's own, and where these lie."""
    targets = sorted(((*span, write) for write, _ in moved for span in _spans(write.target)), key=lambda it: it[0])
    starts = [start for start, *_ in targets]
    for write, spans in moved:
        for start, end in spans:
            at = bisect.bisect_left(starts, end) - 1
            while at >= 0 and targets[at][1] > start:
                other = targets[at][2]
                if other.key != write.key:
                    yield f"{write.key} is in the memory of the model's {other.name}, which is written; pass a clone"
                at -= 1


def _spans(t: object) -> list[Span]:
    """Where the elements of a tensor lie, of a quantized one those of each buffer and of the master."""
    parts = (*t.buffers().values(), t.master) if isinstance(t, QuantizedTensor) else (t,)
    found = []
    for own in [local(part) for part in parts if isinstance(part, torch.Tensor)]:
        plain = type(own) in (torch.Tensor, torch.nn.Parameter) and own.layout == torch.strided
        if plain and not own.is_meta and not own.is_nested and own.numel():
            last = sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
            found.append((own.data_ptr(), own.data_ptr() + (last + 1) * own.itemsize))
    return found


def _wrong_names(found: Match) -> list[str]:
    problems = []
    if found.missing:
        problems.append(f"the weights lack {_some(found.missing)}")
    if found.unused:
        problems.append(f"the model lacks {_some(found.unused)}")
    return problems


def _some(names: tuple[str, ...] | list[str], most: int = 5) -> str:
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"


def _method(model: torch.nn.Module) -> str:
    try:
        return conversion_report(model).method
    except ValueError:
        return "rtn"


def _why_not(write: Write, value: object, check_finite: bool, method: str) -> str:
    """Why a value cannot be written; "" if it can."""
    if not isinstance(value, torch.Tensor):
        return f"must be a tensor, got {describe(value)}"
    if value.layout != torch.strided:
        return f"must be dense, got {value.layout}; pass .to_dense()"
    if value.is_meta:
        return "is on the meta device, and has no values"
    value, target = write.part(value), write.target
    if tuple(value.shape) != tuple(target.shape):
        return f"has the shape {list(value.shape)}, and the model's has {list(target.shape)}"
    if isinstance(value, QuantizedTensor):
        return _why_not_codes(target, value)
    if is_traceable_wrapper_subclass(value) and not is_dtensor(value):
        return f"is a {type(value).__name__}, whose values another library stores"
    floats = value.dtype in DTYPES and target.dtype in DTYPES
    if not floats and (value.dtype != target.dtype or isinstance(target, QuantizedTensor)):
        return f"is {value.dtype}, and the model's is {target.dtype}"
    if isinstance(target, QuantizedTensor) and method != "rtn":
        return (
            f"has values, and the model's codes were made by quire.quantize_model(method={method!r}), while a refit "
            "rounds to nearest; quantize the new model by that method and pass the codes, or serve a model of "
            "quire.convert"
        )
    if check_finite and not _finite(local(value), target):
        return f"has values that are NaN or infinite in {target.dtype}; check_finite=False takes them"
    return ""


def _why_not_codes(target: torch.Tensor, value: QuantizedTensor) -> str:
    if not isinstance(target, QuantizedTensor):
        return f"is quantized as {value.spec_text}, and the model's is in high precision"
    if not same_codes(value.spec_text, target.spec_text):
        return (
            f"is quantized as {value.spec_text}, and the model's as {target.spec_text}; pass values in high precision"
        )
    lacking = [d for d in ("rowwise", "columnwise") if target.stores(d) and not value.stores(d)]
    if target.stacked != value.stacked or lacking:
        return f"must be a {type(target).__name__} with {' and '.join(lacking) or 'the same'} codes, got {value!r}"
    return ""


def _finite(value: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the values are finite once they are rounded as _write_one() does."""
    if not value.is_floating_point() or value.numel() == 0:
        return True
    extremes = torch.stack(torch.aminmax(value.detach()))
    has_master = isinstance(target, QuantizedTensor) and target.master is not None
    return bool(torch.isfinite(extremes if has_master else extremes.to(target.dtype)).all())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values of tied weights are one."""
    if one is other or type(one) is not type(other) or one.shape != other.shape:
        return one is other
    if isinstance(one, QuantizedTensor):
        return all(torch.equal(t, other.buffers()[name]) for name, t in one.buffers().items())
    one, other = local(one), local(other)
    return one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """In which NaNs are equal to themselves."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _overlaps(t: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True))


def _refused_elsewhere(refused: bool, meshes: list[Any]) -> bool:
    """Whether any rank of the meshes refuses: a rank that raised alone would leave the others in a collective."""
    for mesh in meshes:
        flag = torch.tensor([refused], dtype=torch.int32, device=mesh.device_type)
        for dimension in range(mesh.ndim):
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, mesh.get_group(dimension))
        refused = bool(flag)
    return refused


# --- writing

_KINDS = ("quantized", "copied", "plain")


def _write(writes: list[Write], weights: Mapping[str, torch.Tensor]) -> list[tuple[str, int]]:
    """What was done for each, of _KINDS, and the bytes that were written."""
    done: list[tuple[str, int]] = []
    for write in writes:
        try:
            with _writable(write.target):
                done.append(_write_one(write.target, write.part(weights[write.key])))
        except BaseException as error:
            error.add_note(
                f"quire.refit: writing {write.name} failed, after {len(done)} of {counted(len(writes), 'tensor')}. The "
                "model has new weights up to there and old ones behind: refit it again before it is used"
            )
            raise
    return done


def _writable(target: torch.Tensor) -> AbstractContextManager[object]:
    """Tensors that were made in inference mode can be written to only there."""
    made_of = target.buffers().values() if isinstance(target, QuantizedTensor) else (target,)
    return torch.inference_mode() if any(t.is_inference() for t in made_of) else contextlib.nullcontext()


def _write_one(target: torch.Tensor, value: torch.Tensor) -> tuple[str, int]:
    if is_dtensor(target):
        target.copy_(value if is_dtensor(value) else part_for(target, value))
        return "plain", local(target).nbytes
    value = value.full_tensor() if is_dtensor(value) else value
    if not isinstance(target, QuantizedTensor):
        target.copy_(value)
        return "plain", target.nbytes
    if isinstance(value, QuantizedTensor):
        target.copy_(value)
        return "copied", target.nbytes
    value = value.detach()
    target.store(value.to(target.dtype) if target.master is None else value, scale=target.given_scale)
    return "quantized", target.nbytes


def _notes(model: torch.nn.Module, writes: list[Write]) -> list[str]:
    kept = [
        module
        for module in model.modules()
        if isinstance(module, ProductModule) and any(module.of(p, "kept_weight") is not None for p in module.products)
    ]
    if not kept:
        return []
    return [
        f"{counted(len(kept), 'layer')} with codes of quire.quantize_weights, made from the old weights: the next call "
        "raises an error; call quire.quantize_weights again"
    ]
