"""Operations on single tensors: elementwise ones, quantization, and operations that add an input or an output to a
Sequential."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from quire import delayed
from quire.autocast import active_recipe, active_rule
from quire.delayed.forward import keep_largest
from quire.functional import quantize
from quire.loading.devices import has_values
from quire.recipe import Recipe
from quire.te.arguments import refuse
from quire.te.ops.operation import Input, Operation, plain
from quire.tensor import QuantizedActivation, QuantizedTensor


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


class _RoundedGradient(torch.autograd.Function):
    """The identity, whose gradient is rounded under a spec. scale: of delayed scaling, or None. With one, the first of
    the amaxes becomes the maximum of itself and of the gradient's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spec: str, scale: torch.Tensor | None, amaxes: torch.Tensor) -> torch.Tensor:
        ctx.spec, ctx.scale, ctx.amaxes = spec, scale, amaxes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if isinstance(gradient, QuantizedTensor):
            return gradient.dequantize(), None, None, None
        q = quantize(gradient, ctx.spec, scale=ctx.scale)
        if ctx.scale is not None:
            keep_largest(ctx.amaxes, q.rowwise_amax)
        return q.dequantize(gradient.dtype), None, None, None


class Quantize(Operation):
    """Quantizes as the active recipe quantizes inputs of layers. Without a recipe it returns x.

    forward: whether the result is quantized: a QuantizedActivation if there will be a backward pass, else a
        QuantizedTensor. te.ops.Linear takes its codes, all other operations its values.
    backward: whether the gradient is rounded to the recipe's format of gradients, along rows, to nearest and without a
        transform, as by fp8_grad of te.Linear; not under a recipe with a backward_override.

    `delayed` is its DelayedState, with the slots of x and dy, for delayed scaling. Under it, compiled functions cannot
    have backward=True.

    Raises NotImplementedError under recipes with static scales, which are buffers of layers, and under recipes that
    differ by layer.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantize_forward, self.quantize_backward = forward, backward
        self.delayed = delayed.DelayedState()

    def forward(self, x: Input) -> Input:
        recipe = active_recipe()
        if recipe is None:
            return x
        _check(recipe)
        if recipe.weight_only:
            return x
        operands, x_scale, dy_scale = recipe.delayed_operands, None, None
        if operands:
            self._move(x.device)
            scales = delayed.scales(self.delayed)
            x_scale, dy_scale = (
                s[:1] if name in operands else None for s, name in zip(scales, ("x", "dy"), strict=True)
            )
        if self.quantize_backward and recipe.backward_override is None:
            _check_graph(dy_scale)
            gradient = recipe.specs_for(fp8_grad=True).dx
            x = _RoundedGradient.apply(plain(x), gradient, dy_scale, self.delayed.bwd_amax)
        found = x
        if self.quantize_forward and not isinstance(x, QuantizedActivation | QuantizedTensor):
            found = quantize(x, recipe.input_spec, columnwise=torch.is_grad_enabled(), scale=x_scale)
        if operands:
            measured = found is not x and x_scale is not None
            amax = found.buffer_list()[2] if measured else self.delayed.fwd_amax.new_zeros(1)
            delayed.collect(self.delayed, active_rule(), amax, None)
        return found

    def _move(self, device: torch.device) -> None:
        """Moves the state to the device of x: the operation has no parameter that says where it is."""
        if self.delayed.usage.device != device and has_values(device):
            self.delayed.to(device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Quantize":
        super()._apply(fn, recurse)
        self.delayed.to(fn(self.delayed.usage).device)
        return self


def _check(recipe: Recipe) -> None:
    if recipe.static_input or recipe.by_layer:
        raise NotImplementedError(
            f"te.ops.Quantize: {type(recipe).__name__} has scales or specs of single layers, and this operation is "
            "none. Remove it, since layers quantize their inputs themselves, or use Float8CurrentScaling"
        )


def _check_graph(scale: torch.Tensor | None) -> None:
    if scale is not None and torch.compiler.is_compiling():
        raise NotImplementedError(
            "te.ops.Quantize: backward=True is not available under delayed scaling within a compiled function, whose "
            "backward pass cannot write to the amaxes; leave it False, or use Float8CurrentScaling"
        )
