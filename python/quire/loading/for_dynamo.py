"""Functions of torch.compiler and of Dynamo, without an import of Dynamo, which takes more than a second. Decorators
wait until somebody else imports it."""

from collections.abc import Callable
from typing import TypeVar

import torch

from quire.loading.when_imported import when_imported

Function = TypeVar("Function", bound=Callable[..., object])


def allow_in_graph(function: Function) -> Function:
    """Dynamo makes calls of the function nodes of its graph."""
    when_imported("torch._dynamo", lambda dynamo: dynamo.allow_in_graph(function))
    return function


def assume_constant_result(function: Function) -> Function:
    """Dynamo calls the function while it traces, and takes the result for a constant."""
    when_imported("torch._dynamo", lambda dynamo: dynamo.assume_constant_result(function))
    return function


def mark_static(t: torch.Tensor) -> torch.Tensor:
    """As torch._dynamo.mark_static: the sizes of the tensor are constants of graphs with dynamic=True too. Returns t.

    For tensors that quire owns. If their sizes were symbols, Dynamo would give one symbol to a state and to a batch of
    the same size, and compile again for the next batch. What a graph makes has no mark, such as the scales after a step
    within it, until eager code makes them anew.
    """
    t._dynamo_static_indices = set(range(t.dim()))
    t._has_dynamo_dim_marking = True
    return t


@assume_constant_result  # Dynamo of PyTorch 2.11 takes torch.compiler's for True in every compiled function
def is_exporting() -> bool:
    """Whether torch.export traces what calls this."""
    return torch.compiler.is_exporting()
