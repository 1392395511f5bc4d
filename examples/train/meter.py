"""Measurements that look inside PyTorch: how many graphs a run compiled, and what a forward keeps for its backward.

`torch._dynamo` is not a public interface, nor are the operators of collectives. This is the only file that uses them.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclasses.dataclass(frozen=True)
class Graphs:
    """Graphs captured and places where capturing broke off, since `forget_graphs`."""

    captured: int
    breaks: int


def forget_graphs() -> None:
    """Drop all compiled code and set the counts to zero, so that the next recipe starts as in a new process."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def count_graphs() -> Graphs:
    counters = torch._dynamo.utils.counters
    return Graphs(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def saved_bytes(model: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that an eager `forward` of `model` keeps for backward.

    Each storage counts once, however many views of it are saved, and parameters do not count. Copies of parameters in
    another precision do: bfloat16 copies in the baseline, quantized copies in the recipes.
    """
    local = (getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.parameters())
    parameters = {parameter.untyped_storage().data_ptr() for parameter in local}
    storages: dict[int, torch.UntypedStorage] = {}  # holds the storages, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in storages.values())


class Collectives(TorchDispatchMode):
    """Adds up what this process sends in the collectives of its code, if each goes around a ring of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # noqa: ANN001, ANN204
        if DTensor in types:  # it has collectives of its own, which come here afterwards
            return NotImplemented
        result = function(*arguments, **(options or {}))
        name = function.name()
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            whole = max(_nbytes(part) for part in (*arguments, result))  # inputs, or outputs where these are more
            times = 2 if "all_reduce" in name or "allreduce" in name else 1
            size = _group_of(arguments).size()
            self.bytes += times * whole * (size - 1) // size
        return result


def _group_of(arguments: tuple) -> distributed.ProcessGroup:
    """That of a collective: functional ones have its name, as their last text, and others the group itself."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return distributed.ProcessGroup.unbox(argument)
    name = [argument for argument in arguments if isinstance(argument, str)][-1]
    return distributed.distributed_c10d._resolve_process_group(name)


def _nbytes(tensors: object) -> int:
    return sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, torch.Tensor))


def wire_bytes(step: Callable[[], None]) -> int:
    """Bytes that one process sends in a step; 0 without others."""
    if not distributed.is_initialized():
        return 0
    with Collectives() as collectives:
        step()
    return collectives.bytes
