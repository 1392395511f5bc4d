"""Measurements that look inside PyTorch: how many graphs a run compiled, and what a forward keeps for its backward.

`torch._dynamo` is not a public interface. This is the only file that uses it.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn


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
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # holds the storages, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in storages.values())
