"""Further operations on single tensors, and those that add an input or an output to a Sequential."""

from collections.abc import Iterable
from typing import Any

import torch

from quire.te.arguments import refuse
from quire.te.ops.operation import Input, Operation, plain
from quire.tensor import QuantizedActivation


class Bias(Operation):
    """x + bias [size], in x's dtype. bias is 0 at first. tensor_parallel must be False, tensor_parallel_group None."""

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: object = None,
    ) -> None:
        super().__init__()
        given = {"tensor_parallel": tensor_parallel, "tensor_parallel_group": tensor_parallel_group}
        refuse("te.ops.Bias", given, {"tensor_parallel": False, "tensor_parallel_group": None})
        self.bias = torch.nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias to 0."""
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Input) -> torch.Tensor:
        x = plain(x)
        return x + self.bias.to(x.dtype)


class ConstantScale(Operation):
    """x * scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Input) -> torch.Tensor:
        return plain(x) * self.scale


class Dropout(Operation, torch.nn.Dropout):
    """torch.nn.Dropout."""

    def forward(self, x: Input) -> torch.Tensor:
        return super().forward(plain(x))


class Identity(Operation, torch.nn.Identity):
    """torch.nn.Identity."""


class Reshape(Operation):
    """x.reshape(shape)."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, x: Input) -> torch.Tensor:
        return plain(x).reshape(self.shape)


class AddExtraInput(Operation):
    """The sum of x and an extra input.

    in_place: the sum is written to the memory of the extra input, and is a view of it; autograd takes it as a new
    tensor. Within a compiled function it is a copy. The dtype is then that of the extra input. A QuantizedActivation is
    not written.
    """

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Input, extra: Input) -> torch.Tensor:
        if not self.in_place or isinstance(extra, QuantizedActivation):
            return plain(x) + plain(extra)
        if torch.compiler.is_compiling():
            y = (plain(x) + extra).to(extra.dtype)
            with torch.no_grad():
                extra.copy_(y)
            return y
        return _AddedInPlace.apply(plain(x), extra)


class _AddedInPlace(torch.autograd.Function):
    """x + extra, in the memory of extra."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return extra.detach().add_(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dy.to(ctx.dtype), dy


class MakeExtraOutput(Operation):
    """x, which is an extra output too. in_place: of no effect, since autograd adds the gradients."""

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Input) -> tuple[Input, Input]:
        return x, x
