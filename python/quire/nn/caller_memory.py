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


def in_memory(y: torch.Tensor, out: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """y, whose rows of groups an operator has copied to out, as a view of out. In a graph a tensor of its own with the
    same values: a graph cannot return its arguments' memory as a new tensor with a gradient."""
    if not torch.compiler.is_compiling():
        return _InMemory.apply(y, out)
    return torch.where(_in_groups(y, ends), y, out.view(y.shape))


def copied(y: torch.Tensor, out: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same of a y that no operator has copied."""
    memory = out.view(y.shape)
    with torch.no_grad():
        memory.copy_(torch.where(_in_groups(y, ends), y, memory))
    return in_memory(y, out, ends)


def _in_groups(y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Whether each row of y [*, N] belongs to a group: bool [*, 1]."""
    rows = torch.arange(y.shape[:-1].numel(), dtype=torch.int64, device=y.device)
    return (rows < ends[-1]).view(*y.shape[:-1], 1)


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
