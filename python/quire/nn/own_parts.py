"""What state dicts have of weights and static scales of which each rank holds a part as a plain tensor."""

import torch

from quire.distributed.experts import ExpertGroup
from quire.distributed.parallel import Parallel
from quire.distributed.pieces import PlainPart

#: What says where this rank's shard of a tensor is in the whole: its pieces().
Division = Parallel | ExpertGroup


class OwnParts(torch.nn.Module):
    """A module some of whose parameters and buffers may be this rank's shards: a ProductModule that was made with
    `parallel`, or whose groups are sharded and have one parameter, or the static scales of inputs, together."""

    #: Whether it was made with weights that are this rank's shards.
    has_parts = False

    def own_parts(self) -> dict[str, Division]:
        """Parameters and buffers that are this rank's shards, by name, and how they are sharded. Those that parallel
        styles have sharded are not: they are DTensors of the whole."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else self.own_parts():
            # fully_shard has made some DTensors, and parametrizations have other names.
            if type(value := destination.get(prefix + name)) is torch.Tensor:
                destination[prefix + name] = value.as_subclass(PlainPart)

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *options: object) -> None:
        for name in self.own_parts():
            if isinstance(value := state_dict.get(prefix + name), PlainPart):
                state_dict[prefix + name] = value.plain()
        super()._load_from_state_dict(state_dict, prefix, *options)
