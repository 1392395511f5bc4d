"""What fully_shard is about to do with a parameter whose codes are gathered: which codes the pass needs, and the amaxes
of the whole weight."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import distributed

from quire.distributed import check_ranks
from quire.functional import amax

#: Of codes: (rowwise, columnwise).
Directions = tuple[bool, bool]
Amaxes = tuple[torch.Tensor | None, torch.Tensor | None]

ROWWISE, COLUMNWISE, BOTH = (True, False), (False, True), (True, True)


class Gathering:
    """Of a layer whose weights are gathered as codes: their state from gather to gather.

    model: the one that gather_codes() got, which contains what fully_shard is called for; None in a copy of the layer
    alone. Then the pass is not known, and both directions are gathered.
    directions: weight -> the codes that the last gather brought. amaxes: weight -> those that forward has reduced.
    scales: weight -> the scale of delayed scaling in forward.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.model = model
        self.directions: dict[str, Directions] = {}
        self.amaxes: dict[str, Amaxes] = {}
        self.scales: dict[str, torch.Tensor] = {}
        self._reduced: set[str] = set()
        self._found: dict[str, Found | None] = {}

    def find(self, layer: torch.nn.Module, name: str) -> "Found | None":
        """fully_shard's objects for a parameter; None if they are not as in versions of PyTorch that quire knows."""
        if name not in self._found:
            self._found[name] = _find(self.model, layer, name)
        return self._found[name]

    def offer(self, name: str, amaxes: Amaxes) -> None:
        """Amaxes of a weight for its next gather in forward, which is gathered with another one."""
        self.amaxes[name] = amaxes
        self._reduced.add(name)

    def take(self, name: str, in_backward: bool) -> Amaxes | None:
        """Amaxes that need no collective: those offered, or in backward those of forward."""
        found = self.amaxes.get(name) if in_backward or name in self._reduced else None
        self._reduced.discard(name)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "Gathering":
        return Gathering(memo.get(id(self.model)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Gathering, (None,)


class Found(NamedTuple):
    """PyTorch's objects for a parameter: that of its group of parameters, and its own."""

    group: Any
    parameter: Any

    @property
    def in_backward(self) -> bool:
        """Whether the gather is for a backward pass, and a forward pass was before."""
        return getattr(getattr(self.group, "_training_state", None), "name", None) == "PRE_BACKWARD"

    @property
    def alone(self) -> Directions | None:
        """The one direction that the pass needs, as if backward needed columnwise codes; None if it may need both."""
        state = getattr(getattr(self.group, "_training_state", None), "name", None)
        runs_backward = torch._C._current_graph_task_id() != -1
        if state == "FORWARD" and not runs_backward and getattr(self.group, "_reshard_after_forward", False):
            return ROWWISE
        if self.in_backward and getattr(self.group, "reshard_after_backward", False):
            return COLUMNWISE
        return None

    def expect(self, size: int) -> None:
        """That each rank gives so many bytes, where it may have given others before."""
        outputs = self.parameter.all_gather_outputs
        if outputs and outputs[0].numel() != size * self.group.mesh_info.shard_mesh_size:
            self.parameter.all_gather_outputs = []

    def siblings(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
        """Layer, name and this rank's shard of each parameter that is gathered with this one."""
        for parameter in self.group.fsdp_params:
            info = parameter._module_info
            yield info.module, info.param_name, parameter._sharded_local_tensor


def _find(model: torch.nn.Module | None, layer: torch.nn.Module, name: str) -> Found | None:
    """They are PyTorch's own, and nothing public says which pass a gather is for."""
    for group in fsdp_groups(model):
        for parameter in group.fsdp_params:
            if parameter._module_info.module is layer and parameter._module_info.param_name == name:
                return Found(group, parameter)
    return None


def fsdp_groups(model: object) -> list[Any]:
    """fully_shard's groups of parameters of a module and of those in it; [] if it shards none. They are PyTorch's own:
    nothing public says which of them hold whole parameters now."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    states = [getattr(module, "_get_fsdp_state", lambda: None)() for module in modules]
    each = [getattr(state, "_fsdp_param_groups", None) or _one_group(state) for state in states]
    return [group for groups in each for group in groups]


def _one_group(state: object) -> list[Any]:
    """That of PyTorch 2.11, whose modules have one at most."""
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def reduced_amaxes(
    values: list[torch.Tensor], specs: list[str], group: "distributed.ProcessGroup | None"
) -> list[Amaxes]:
    """quire.amax() of whole tensors, of which each rank of the group has some of the rows; in one collective."""
    own = [amax(value, spec, True, True) for value, spec in zip(values, specs, strict=True)]
    # Of fp8_row and row_scaled, a row's amax is its own.
    shared = [(i, d) for i, both in enumerate(own) for d in (0, 1) if d == 1 or both[d].numel() == 1]
    flat = torch.cat([own[i][d] for i, d in shared])
    if group is not None and distributed.get_world_size(group) > 1:

        def said() -> tuple[str, check_ranks.Fields]:
            fields = {"weights": len(values), "recipe w": " ".join(dict.fromkeys(specs)), "amaxes": len(flat)}
            return "quire.distributed.gather_codes", fields

        check_ranks.agree(group, "gathered amaxes", (len(flat),), said, group, device=flat.device)
        distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=group)
    pieces = iter(flat.split([own[i][d].numel() for i, d in shared]))
    whole = [list(both) for both in own]
    for i, d in shared:
        whole[i][d] = next(pieces).clone()
    return [(both[0], both[1]) for both in whole]
