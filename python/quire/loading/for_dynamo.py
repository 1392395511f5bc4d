"""torch.compiler's decorators of the same names, without an import of Dynamo, which takes more than a second. These
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


@assume_constant_result  # Dynamo of PyTorch 2.11 takes torch.compiler's for True in every compiled function
def is_exporting() -> bool:
    """Whether torch.export traces what calls this."""
    return torch.compiler.is_exporting()
