"""What quire.explain says of collectives, and how it leaves a model whose parameters fully_shard shards."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed

from quire.distributed.gathering import fsdp_groups

#: Operators that start a collective, functional ones and those of process groups: its name, and which argument has the
#: tensors that this rank gives.
_COLLECTIVES = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
}

#: Operators of quire whose kernel calls collectives. Without gradients a mode sees such an operator only.
_CALLERS = ("quire::parallel_linear", "quire::parallel_grouped_linear")


def described(operator: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[str, object] | None:
    """Of an operator that starts a collective: the collective with its options and its group, as "{} over 'tp'", and
    the tensors that this rank gives. None for any other operator."""
    found = _COLLECTIVES.get(operator._schema.name)
    if found is None:
        return None
    name, given = found
    objects = {value._type().name(): value for value in args if isinstance(value, torch.ScriptObject)}
    if not objects:
        *options, group = [value for value in args if isinstance(value, str)]
    else:
        its = distributed.ProcessGroup.unbox(objects["ProcessGroup"])
        group = its.group_desc or its.group_name
        reduction = objects.get("ReduceOp")
        options = [] if reduction is None else [distributed.ReduceOp.RedOpType(reduction.op()).name.lower()]
    return f"{' '.join([name, *options])} of {{}} over {group!r}", args[given]


def calls_collectives(operator: torch._ops.OpOverload) -> bool:
    """Whether its kernel calls collectives, which run_below() shows to a mode."""
    return operator._schema.name in _CALLERS


def run_below(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The kernel of the operator for the device of its first argument."""
    key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(args[0].device.type))
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


@contextlib.contextmanager
def sharded_as_before(model: object) -> Iterator[None]:
    """Afterwards, fully_shard's groups of parameters that had parts have parts again: what they gathered may have other
    values by then."""
    with_parts = [group for group in fsdp_groups(model) if group.is_sharded]
    try:
        yield
    finally:
        for group in with_parts:
            group.reshard()


@contextlib.contextmanager
def own_gradients(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it their .grad begins as None; afterwards it is what it was."""
    before = [t.grad for t in tensors]
    try:
        for t in tensors:
            t.grad = None
        yield
    finally:
        for t, grad in zip(tensors, before, strict=True):
            t.grad = grad
