"""How the weights of a module are sharded over ranks: by itself, by PyTorch's parallel styles, or by quire's functions
of data parallelism; and what its state dicts have of weights that are shards."""

import torch

from quire.distributed.data_parallel import Shards
from quire.distributed.experts import ExpertGroup
from quire.distributed.fully_sharded import Gathering
from quire.distributed.groups import group_size, named_group
from quire.distributed.parallel import Parallel, refuse_quantized
from quire.distributed.pieces import PlainPart
from quire.distributed.placements import is_dtensor, local, sharding_of
from quire.tensor import QuantizedTensor

#: Says by pieces() where this rank's shard lies in the whole tensor.
Sharding = Parallel | ExpertGroup


def named(product: str, what: str) -> str:
    """The attribute of a module that holds `what` of a matmul: "weight", or "fc1_weight" for the matmul "fc1"."""
    return f"{product}_{what}" if product else what


class ShardedModule(torch.nn.Module):
    """The base class of a ProductModule for what it knows of ranks. A module in one process keeps the defaults."""

    parallel: Parallel | None = None
    #: Over which ranks the groups are sharded.
    expert_group: ExpertGroup | None = None
    #: Weights that shard_weights() has sharded, and over which ranks.
    shards: dict[str, Shards] | None = None
    #: Of gather_codes().
    gathering: Gathering | None = None
    #: Whether it was made with weights that are this rank's shards.
    has_parts = False

    def set_sharding(self, product: str, parallel: Parallel | None) -> None:
        """Records how the weight of a matmul is sharded from now on. The parts of the weight get one random stream, the
        one of part 0: all ranks must call it."""
        setattr(self, named(product, "parallel"), parallel)
        self._forget_weights()
        if parallel is not None:
            state = self.of(product, "sr_state")
            setattr(self, named(product, "part"), parallel.place(state.device))
            if not state.is_meta:
                shared = torch.cat([state, state.new_tensor([self.stream])])
                parallel.share_first(shared)
                state.copy_(shared[:2])
                self.stream = int(shared[2])

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """Gives a process group to a layer that was made with Parallel(mode, None, size=...); all ranks of the group
        must call it. Of other layers it takes None, groups of one process and the layer's own. Raises ValueError for a
        group of another size, NotImplementedError for other groups."""
        size, own = group_size(tp_group), self.of(self.products[0], "parallel")
        if own is not None and not own.group and tp_group is not None:
            sharded = [(product, self.of(product, "parallel").of_group(tp_group)) for product in self.products]
            for product, parallel in sharded:
                self.set_sharding(product, parallel)
            return
        if size != 1 and (own is None or named_group(own.group) != tp_group):
            raise NotImplementedError(
                f"quire.{type(self).__name__}: a layer is sharded over ranks when it is made, and this one was not; "
                f"got a group of {size} ranks. Pass parallel=quire.distributed.Parallel(...) to the constructor"
            )

    def sharded_dims(self, mode: str) -> dict[str, int | None]:
        """Parameter -> the dimension along which a "column" or "row" layer shards it over ranks, None: not at all.
        Raises NotImplementedError if the layer cannot be sharded."""
        raise NotImplementedError(
            f"quire.{type(self).__name__}: it cannot be sharded over ranks; use it for a quire.Linear, "
            "quire.LayerNormLinear or quire.LayerNormMLP"
        )

    def _new_sharding(self, name: str, new: torch.Tensor | None) -> tuple[bool, str, Parallel | None]:
        """Whether a new parameter shards its matmul in another way, the matmul, and how. Raises NotImplementedError if
        the weight was quantized, ValueError for what sharding_of() does not know."""
        old, what = self._parameters.get(name), f"quire.{type(self).__name__}"
        product = next((product for product in self.products if named(product, "weight") == name), None)
        if product is None or new is None or not (is_dtensor(new) or is_dtensor(old)):
            return False, "", None
        if is_dtensor(old) and is_dtensor(new):
            # Data parallelism replaces DTensors that say nothing of how the layer computes.
            same = old.device_mesh == new.device_mesh and old.placements == new.placements
            if same or self.of(product, "parallel") is None:
                return False, "", None
        before, parallel = self.of(product, "parallel"), sharding_of(new, what)
        if isinstance(old, QuantizedTensor) or isinstance(local(new), QuantizedTensor):
            refuse_quantized(what, str(new.placements) if parallel is None else parallel.text)
        if before is not None and not is_dtensor(old):
            raise ValueError(
                f"{what}: {name} is this rank's shard already ({before.text}), and cannot become a DTensor; make the "
                "layer without parallel= and tensor-parallel options, and shard it then"
            )
        return True, product, parallel

    def own_parts(self) -> dict[str, Sharding]:
        """Parameters and buffers that are this rank's shards as plain tensors, by name, and how they are sharded. What
        parallel styles have sharded is not among them: these parameters are DTensors."""
        found = {}
        for product in self.products if self.has_parts else ():
            parallel = self.of(product, "parallel")
            found[named(product, "weight")] = parallel
            if parallel.mode == "column" and self.biases(product):
                found[named(product, "bias")] = parallel
        return found

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
