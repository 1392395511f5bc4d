"""Operations that a script defines itself, by a forward and a backward function."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from quire.te.ops.operation import Input, Operation, plain

Tensors = Sequence[torch.Tensor | None]
#: What the forward pass leaves to the backward pass: of torch.autograd.Function.
Context = Any


class BasicOperation(Operation):
    """An operation that a subclass defines by op_forward and op_backward, or with extra inputs or outputs by
    fuser_forward and fuser_backward. num_extra_inputs, num_extra_outputs: how many it has, attributes of the class.

    op_forward(ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, **op_kwargs) -> y.
    op_backward(ctx, grad_output) -> gradients of the input, and of each parameter in the order of parameters().

    fuser_forward(basic_op_ctxs, input_, *, basic_op_extra_inputs, prev_op_grad_output_quantizer,
    next_op_input_quantizer, basic_op_kwargs) -> y, [extra outputs]. fuser_backward(basic_op_ctxs, grad_output, *,
    basic_op_grad_extra_outputs) -> gradients of the input, [of each parameter], [of each extra input]. The arguments
    are lists with one entry, this operation's. The gradient of an extra output that nothing used is None, or within a
    compiled function zero.

    ctx is that of a torch.autograd.Function: save_for_backward(), saved_tensors, requires_grad, and attributes of other
    names. Quantizers of other operations are None. Gradients may be None. There are no second derivatives.
    """

    def op_forward(
        self,
        ctx: Context,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: None = None,
        next_op_input_quantizer: None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__}: define op_forward and op_backward")

    def op_backward(
        self, ctx: Context, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Iterable[torch.Tensor | None]]:
        raise NotImplementedError(f"{type(self).__name__}: define op_forward and op_backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[Context],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        basic_op_kwargs: list[dict[str, object]],
        **quantizers: None,
    ) -> tuple[torch.Tensor, list[Tensors]]:
        self._check_alone("fuser_forward")
        return self.op_forward(basic_op_ctxs[0], input_, **quantizers, **basic_op_kwargs[0]), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[Context],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[Tensors],
    ) -> tuple[torch.Tensor | None, list[Tensors], list[Tensors]]:
        self._check_alone("fuser_backward")
        dx, of_parameters = self.op_backward(basic_op_ctxs[0], grad_output)
        return dx, [tuple(of_parameters)], [()]

    def _check_alone(self, name: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise RuntimeError(
                f"{type(self).__name__}: an operation with extra inputs or outputs must define {name}; it has "
                f"{self.num_extra_inputs} and {self.num_extra_outputs}"
            )

    def forward(self, x: Input, *extra_inputs: torch.Tensor, **kwargs: object) -> torch.Tensor | tuple:
        """The result, or a tuple of it and the extra outputs. kwargs: further arguments of op_forward. Raises
        TypeError for another number of extra inputs, RuntimeError if a function returns another number of tensors."""
        if len(extra_inputs) != self.num_extra_inputs:
            raise TypeError(
                f"{type(self).__name__}: it takes {self.num_extra_inputs} extra inputs, got {len(extra_inputs)}"
            )
        results = _Call.apply(self, kwargs, plain(x), *map(plain, extra_inputs), *self.parameters())
        return results if self.num_extra_outputs else results[0]


class _Call(torch.autograd.Function):
    """One call of a BasicOperation, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, operation: BasicOperation, kwargs: dict[str, object], x: torch.Tensor, *more: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        y, extra_outputs = operation.fuser_forward(
            [ctx],
            x,
            basic_op_extra_inputs=[more[: operation.num_extra_inputs]],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[kwargs],
        )
        extra = tuple(extra_outputs[0])
        _check_count(operation, "fuser_forward", "extra outputs", extra, operation.num_extra_outputs)
        ctx.called = operation, (y.shape, y.dtype, y.device)
        results = _distinct((y, *extra), (x, *more))
        ctx.mark_non_differentiable(*[t for t in results if not t.is_floating_point()])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, *of_extra: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        operation, (shape, dtype, device) = ctx.called
        if dy is None:
            dy = torch.zeros(shape, dtype=dtype, device=device)
        dx, of_parameters, of_inputs = operation.fuser_backward([ctx], dy, basic_op_grad_extra_outputs=[of_extra])
        parameters, inputs = tuple(of_parameters[0]), tuple(of_inputs[0])
        count = len(ctx.needs_input_grad) - 3 - operation.num_extra_inputs
        _check_count(operation, "fuser_backward", "gradients of parameters", parameters, count)
        _check_count(operation, "fuser_backward", "gradients of extra inputs", inputs, operation.num_extra_inputs)
        return None, None, dx, *inputs, *parameters


def _check_count(operation: BasicOperation, function: str, what: str, found: Sequence[object], wanted: int) -> None:
    if len(found) != wanted:
        raise RuntimeError(
            f"{type(operation).__name__}.{function}: expected {wanted} {what}, got {len(found)}; return one for each, "
            "or None"
        )


def _distinct(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Results as autograd accepts them: none of them is an input, or another result."""
    found: list[torch.Tensor] = []
    for tensor in results:
        taken = any([tensor is other for other in (*inputs, *found)])
        found.append(tensor.view_as(tensor) if taken else tensor)
    return tuple(found)
