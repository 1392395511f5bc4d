"""A chain of modules."""

from collections.abc import Mapping

import torch

from quire.nn import linear
from quire.te.ops.operation import Input, Operation, plain

Key = int | torch.nn.Module


class Sequential(torch.nn.Sequential):
    """Modules one after another, each a single call: nothing is fused across them. A dict gives them names.

    Extra inputs of operations follow the first in the order of the operations, and extra outputs are returned likewise.
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
        op_kwargs: Mapping[Key, Mapping[str, object]] | None = None,
    ) -> Input | tuple[Input, ...]:
        """The result of the last module, or a tuple of that and the extra outputs.

        op_kwargs: module or index -> further arguments of its forward. Raises ValueError for extra inputs of another
        number than the operations take, and for a module that is not here.
        """
        wanted = sum([getattr(module, "num_extra_inputs", 0) for module in self])
        if len(extra_inputs) != wanted:
            raise ValueError(f"te.ops.Sequential: its operations take {wanted} extra inputs, got {len(extra_inputs)}")
        given = self._by_index(op_kwargs or {})
        x, outputs, taken = input, [], 0
        for index, module in enumerate(self):
            options, extra = given.get(index, {}), ()
            if isinstance(module, Operation):
                extra = extra_inputs[taken : taken + module.num_extra_inputs]
                taken += module.num_extra_inputs
            elif not isinstance(module, linear.Linear):
                x = plain(x)
            x = module(x, *extra, **options)
            if getattr(module, "num_extra_outputs", 0):
                x, *more = x
                outputs += more
        return (x, *outputs) if outputs else x

    def _by_index(self, op_kwargs: Mapping[Key, Mapping[str, object]]) -> dict[int, Mapping[str, object]]:
        found, modules = {}, list(self)
        for key, options in op_kwargs.items():
            places = [i for i, module in enumerate(modules) if module is key]
            if isinstance(key, int) and -len(modules) <= key < len(modules):
                places = [key % len(modules)]
            if not places:
                raise ValueError(f"te.ops.Sequential: op_kwargs names {key!r}, which is not one of its modules")
            found[places[0]] = options
        return found
