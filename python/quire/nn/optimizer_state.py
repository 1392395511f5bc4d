"""Converts optimizer states from versions in which GroupedLinear had another order of parameters."""

import itertools
from collections.abc import Mapping, Sequence

import torch

from quire.checks import check_type
from quire.nn.grouped_linear import GroupedLinear

_WHAT = "reorder_optimizer_state"


def reorder_optimizer_state(
    state: Mapping[str, object], optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> Mapping[str, object]:
    """An optimizer's state_dict in the order that optimizer.load_state_dict() needs: `state` itself if it has the order
    of the parameters, else a reordered copy with the same tensors.

    Optimizers number parameters. A GroupedLinear with biases once had all weights first and then all biases; it now has
    weight0, bias0, weight1, ... The shapes show which order a state has. optimizer: an optimizer of the model's
    parameters, with the same groups as the saved one.

    Raises ValueError if the number of parameters differs, or if the shapes of the state's tensors fit neither order.
    """
    check_type(_WHAT, Mapping, state=state)
    check_type(_WHAT, torch.optim.Optimizer, optimizer=optimizer)
    check_type(_WHAT, torch.nn.Module, model=model)
    saved, now = state["param_groups"], [group["params"] for group in optimizer.param_groups]
    if [len(group["params"]) for group in saved] != [len(parameters) for parameters in now]:
        raise ValueError(
            f"{_WHAT}: the state is of groups of {[len(group['params']) for group in saved]} parameters, the optimizer "
            f"has groups of {[len(parameters) for parameters in now]}; make it of the parameters of the saved one"
        )
    numbers = [number for group in saved for number in group["params"]]
    flat = [parameter for parameters in now for parameter in parameters]
    if _fits(state["state"], numbers, flat):
        return state
    order = _older_order(now, model)
    older = [[group["params"][i] for i in places] for group, places in zip(saved, order, strict=True)]
    if not _fits(state["state"], [number for group in older for number in group], flat):
        raise ValueError(
            f"{_WHAT}: tensors of the state have not the shapes of the parameters, neither in the order of now nor in "
            "that of before; load a state that was saved with this model"
        )
    groups = []
    for group, places in zip(saved, order, strict=True):
        of_each = {key: [group[key][i] for i in places] for key in ("params", "param_names") if key in group}
        groups.append(group | of_each)
    return {**state, "param_groups": groups}


def _fits(
    state: Mapping[int, Mapping[str, object]], numbers: Sequence[int], parameters: Sequence[torch.Tensor]
) -> bool:
    """Whether what the state has of each number is of that parameter's shape, or a single value."""
    for number, parameter in zip(numbers, parameters, strict=True):
        for value in state.get(number, {}).values():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                return False
    return True


def _older_order(groups: Sequence[Sequence[torch.Tensor]], model: torch.nn.Module) -> list[list[int]]:
    """For each place of a parameter group, where its parameter was before."""
    owner = {}
    for number, module in enumerate(model.modules()):
        if isinstance(module, GroupedLinear):
            owner |= {id(getattr(module, name)): (number, False) for name in module.weight_names}
            owner |= {id(getattr(module, name)): (number, True) for name in module.bias_names}
    found = []
    for parameters in groups:
        owners = [owner.get(id(parameter), (None, False)) for parameter in parameters]
        of_module = itertools.groupby(range(len(parameters)), key=lambda place, owners=owners: owners[place][0])
        before = [p for _, run in of_module for p in sorted(run, key=lambda place, owners=owners: owners[place][1])]
        found.append([before.index(place) for place in range(len(parameters))])
    return found
