"""A chain of modules (Sequential), and FusedOperation, in which quire computes the operations one by one."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from quire.nn import linear
from quire.nn.recompute import checkpoint
from quire.te.ops.curves import ScaledSReLU
from quire.te.ops.layer_operations import GroupedLinear
from quire.te.ops.operation import Input, Operation, check_routes, plain

Key = int | torch.nn.Module
Options = Mapping[str, object]


class Sequential(torch.nn.Sequential):
    """Modules one after another, each a single call: nothing is fused across them. A dict gives them names.

    Extra inputs of operations follow the first in the order of the operations, and extra outputs are returned likewise.
    Those with a name (set_extra_input_channel, set_extra_output_channel) connect operations instead.
    """

    def __init__(self, *modules: torch.nn.Module | Mapping[str, torch.nn.Module]) -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            super().__init__()
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            super().__init__(*modules)

    def forward(
        self,
        input: Input,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[Key, Options] | None = None,
    ) -> Input | tuple[Input, ...]:
        """The result of the last module, or a tuple of that and the extra outputs.

        op_kwargs: module or index -> further arguments of its forward. Raises ValueError for extra inputs of another
        number than the operations take, for names of extra inputs and outputs that do not fit, and for a module that is
        not here. Nothing has been computed then.
        """
        modules = [each for module in self for each in getattr(module, "basic_ops", (module,))]
        wanted = check_routes(modules)
        if len(extra_inputs) != wanted:
            raise ValueError(f"te.ops.Sequential: its operations take {wanted} extra inputs, got {len(extra_inputs)}")
        given = self._by_module(op_kwargs or {}, modules)
        tensors = _ExtraTensors(extra_inputs)
        x, recomputed = input, None
        for index, module in enumerate(modules):
            extra, options = tensors.of(module), given.get(index, {})
            if recomputed is not None:
                x, recomputed = _recomputing(recomputed, module, x, extra, options), None
            elif _is_recomputed(modules[index : index + 2]):
                recomputed = (module, extra, options)
            else:
                x = tensors.keep(module, _call(module, x, extra, options))
        return (x, *tensors.outputs) if tensors.outputs else x

    def _by_module(self, op_kwargs: Mapping[Key, Options], modules: list[torch.nn.Module]) -> dict[int, Options]:
        """Index in modules -> further arguments."""
        found = {}
        for key, options in op_kwargs.items():
            module = self[key] if isinstance(key, int) and -len(self) <= key < len(self) else key
            places = [i for i, each in enumerate(modules) if each is module]
            if not places:
                raise ValueError(f"te.ops.Sequential: op_kwargs names {key!r}, which is not one of its modules")
            found[places[0]] = options
        return found


class _ExtraTensors:
    """The extra inputs and outputs of one call, after check_routes()."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.inputs, self.taken = inputs, 0
        self.outputs: list[torch.Tensor] = []
        self.named: dict[str, torch.Tensor] = {}

    def of(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The extra inputs of a module."""
        if not isinstance(module, Operation):
            return []
        found = []
        for place in range(module.num_extra_inputs):
            name = module.input_channels.get(place)
            found.append(self.inputs[self.taken] if name is None else self.named[name])
            self.taken += name is None
        return found

    def keep(self, module: torch.nn.Module, result: Input | tuple[Input, ...]) -> Input:
        """The first result of a module. The extra results are stored for their takers."""
        if not getattr(module, "num_extra_outputs", 0):
            return result
        x, *more = result
        channels, hidden = getattr(module, "output_channels", {}), getattr(module, "hidden_outputs", ())
        for place, tensor in enumerate(more):
            if place in channels:
                self.named[channels[place]] = tensor
            if place not in hidden:
                self.outputs.append(tensor)
        return x


def _call(module: torch.nn.Module, x: Input, extra: Sequence[torch.Tensor], options: Options) -> object:
    if not isinstance(module, Operation | linear.Linear):
        x = plain(x)
    return module(x, *extra, **options)


def _is_recomputed(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether the result of the first module, which the second saves for backward, is computed again there."""
    first, second = modules if len(modules) == 2 else (None, None)
    return isinstance(first, ScaledSReLU) and first.activation_recompute_in_mlp and isinstance(second, GroupedLinear)


def _recomputing(
    first: tuple[ScaledSReLU, Sequence[torch.Tensor], Options],
    module: GroupedLinear,
    x: Input,
    extra: Sequence[torch.Tensor],
    options: Options,
) -> torch.Tensor:
    activation, scales, own = first

    def both(x: torch.Tensor, *extra: torch.Tensor) -> torch.Tensor:
        return module(activation.scaled(x, *extra[: len(scales)], **own), *extra[len(scales) :], **options)

    return checkpoint(both, plain(x), *scales, *extra)


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
