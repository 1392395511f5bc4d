"""Results in memory of the caller's (GroupedLinear.forward: out, dgrad_out)."""

from typing import Any

import torch


class _InMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.view(y.shape).detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


def in_memory(y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """y, which an operator has copied to out, as a view of out. In a graph it stays y: a graph cannot return its
    arguments' memory as a new tensor with a gradient."""
    return y if torch.compiler.is_compiling() else _InMemory.apply(y, out)


def check_memory(x: torch.Tensor, **memory: tuple[torch.Tensor | None, int]) -> None:
    """Raises ValueError unless memory, if there is any, has the shape of a result of a width: name -> both. In a graph
    the operator checks it."""
    if x.is_nested or x.dim() == 0 or torch.compiler.is_compiling():
        return
    for name, (given, width) in memory.items():
        shapes = [[*x.shape[:-1], width], [x.shape[:-1].numel(), width]]
        if given is not None and list(given.shape) not in shapes:
            got = list(given.shape)
            raise ValueError(f"quire.GroupedLinear: {name} must be {shapes[0]}, or {shapes[1]}, got {got}")
