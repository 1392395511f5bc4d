"""Operations that a script computes together. quire computes them one by one."""

import warnings
from collections.abc import Callable, Iterable

import torch

from quire.te.ops.op_sequence import Sequential
from quire.te.ops.operation import Input, Operation


class FusedOperation(Operation):
    """Operations one after another, as one module. The functions fuser_forward and fuser_backward of a subclass, which
    must compute the same, are not called.

    basic_ops: the operations.
    """

    is_fused_op = True

    def __init__(self, basic_ops: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        if not self.basic_ops:
            raise ValueError(f"{type(self).__name__}: basic_ops must be one or more operations, got none")

    def forward(self, x: Input, *extra_inputs: torch.Tensor) -> Input | tuple[Input, ...]:
        """As a Sequential of the operations."""
        return Sequential(*self.basic_ops)(x, *extra_inputs)


def _accepted(name: str) -> Callable[..., None]:
    def register(func: Callable[..., list[torch.nn.Module]], prepend: bool = False) -> None:
        warnings.warn(
            f"te.ops.{name}: quire never fuses operations, and does not call {getattr(func, '__name__', func)}. "
            "Results are those of the single operations",
            stacklevel=2,
        )

    register.__name__ = register.__qualname__ = name
    register.__doc__ = "Warns that operations are not fused."
    return register


register_forward_fusion = _accepted("register_forward_fusion")
register_backward_fusion = _accepted("register_backward_fusion")
register_forward_backward_fusion = _accepted("register_forward_backward_fusion")
