"""The base classes of operations: Operation, of all operations of a Sequential, with names for extra inputs and
outputs; and BasicOperation, of those that a script defines itself by a forward and a backward function."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch

from quire.nn.layer_base import ShownName, uses_torch_autocast
from quire.tensor import QuantizedActivation, QuantizedTensor

#: The input of an operation. Quantize returns quantized tensors.
Input = torch.Tensor | QuantizedActivation


class Operation(ShownName):
    """A module that a Sequential gives further tensors to, and takes further ones from. TransformerEngine's
    FusibleOperation.

    num_extra_inputs: how many tensors forward takes after the first. num_extra_outputs: how many it returns after the
    first, in a tuple. input_channels, output_channels: names of extra inputs and outputs, by position. Within a
    Sequential an output is passed to the inputs of its name. It reads the names at each call, so they can change
    between calls. is_fused_op: whether it is a FusedOperation.
    """

    shown_in = "quire.te.ops"
    is_fused_op = False
    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    input_channels: Mapping[int, str] = {}
    output_channels: Mapping[int, str] = {}
    #: Positions of extra outputs that a Sequential does not return.
    hidden_outputs: frozenset[int] = frozenset()

    def set_extra_input_channel(self, index: int, channel: str | None) -> Self:
        """Extra input number `index` is the extra output of that name of an operation before this one, in the same
        Sequential; it is then no argument of the Sequential. None: it is an argument again. Returns the operation.

        Raises IndexError for an index that there is not, ValueError for what is no name.
        """
        _check(self, "input", index, self.num_extra_inputs, channel)
        self.input_channels = _with(self.input_channels, index, channel)
        return self

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> Self:
        """Names extra output number `index`; any number of operations after this one can take it. None: it has no name,
        and is returned. Returns the operation.

        output_to_caller: whether the Sequential returns it too. Raises IndexError for an index that there is not,
        ValueError for what is no name, TypeError if output_to_caller is no bool.
        """
        _check(self, "output", index, self.num_extra_outputs, channel)
        if not isinstance(output_to_caller, bool):
            raise TypeError(
                f"te.ops.{type(self).__name__}.set_extra_output_channel: output_to_caller must be a bool, got "
                f"{output_to_caller!r}"
            )
        self.output_channels = _with(self.output_channels, index, channel)
        hidden = {index} if channel is not None and not output_to_caller else set()
        self.hidden_outputs = self.hidden_outputs - {index} | hidden
        return self


def _check(operation: Operation, kind: str, index: int, count: int, channel: str | None) -> None:
    what = f"te.ops.{type(operation).__name__}.set_extra_{kind}_channel"
    if not isinstance(index, int) or not 0 <= index < count:
        raise IndexError(f"{what}: index {index!r} is out of range; the operation has {count} extra {kind}s")
    if channel is not None and (not isinstance(channel, str) or not channel):
        raise ValueError(f"{what}: channel must be a non-empty string or None, got {channel!r}")


def _with(channels: Mapping[int, str], index: int, channel: str | None) -> dict[int, str]:
    kept = {place: name for place, name in channels.items() if place != index}
    return kept if channel is None else kept | {index: channel}


def check_routes(modules: Iterable[torch.nn.Module]) -> int:
    """How many extra inputs the caller of these modules passes. Raises ValueError if the names of extra inputs and
    outputs do not fit. Names are valid up to the next module that is no operation."""
    wanted, operations = 0, []
    for module in (*modules, None):
        if isinstance(module, Operation):
            operations.append(module)
            wanted += module.num_extra_inputs - len(module.input_channels)
        elif operations:
            _check_run(operations)
            operations = []
    return wanted


def _check_run(operations: list[Operation]) -> None:
    """Checks the names of operations with no other module between them."""
    made: list[str] = []
    every = [name for operation in operations for name in operation.output_channels.values()]
    for operation in operations:
        what = f"te.ops.Sequential: {type(operation).__name__}"
        for name in operation.input_channels.values():
            if name not in made:
                earlier = "earlier " if name in every else ""
                raise ValueError(
                    f"{what} takes the extra tensor {name!r}, which has no {earlier}producer: an operation before it, "
                    "with no other kind of module between them, must have an extra output of that name; those before "
                    f"it have {sorted(made)}. Use set_extra_output_channel"
                )
        for name in operation.output_channels.values():
            if name in made:
                raise ValueError(
                    f"{what} names an extra output {name!r}, which then has multiple producers; give each extra "
                    "output of a Sequential another name"
                )
            made.append(name)


def plain(x: Input) -> torch.Tensor:
    """x in high precision."""
    return x.dequantize() if isinstance(x, QuantizedActivation | QuantizedTensor) else x


def in_dtype_of(x: Input, weight: torch.Tensor) -> Input:
    """A plain x in the dtype of a layer's weight; torch.autocast, where it is enabled, decides instead."""
    if isinstance(x, QuantizedActivation | QuantizedTensor) or x.dtype == weight.dtype or uses_torch_autocast(x):
        return x
    return x.to(weight.dtype)


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

    ctx is that of a torch.autograd.Function: save_for_backward(), saved_tensors, requires_grad, which is always True,
    and attributes of other names. Quantizers of other operations are None. Gradients may be None. There are no second
    derivatives.
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
        if torch.compiler.is_dynamo_compiling():
            ctx.requires_grad = True  # as in eager mode, always; Dynamo of PyTorch 2.14 does not know it
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
        # In a graph a view of each: one_process._moved() explains what PyTorch 2.11 does without.
        found.append(tensor.view_as(tensor) if taken or torch.compiler.is_compiling() else tensor)
    return tuple(found)
