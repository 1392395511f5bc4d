"""Operation, the base class of all operations of a Sequential, with names for extra inputs and outputs."""

from collections.abc import Iterable, Mapping
from typing import Self

import torch

from quire.nn.dtype import uses_torch_autocast
from quire.nn.shown_name import ShownName
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
