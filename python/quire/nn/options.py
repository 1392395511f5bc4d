"""TransformerEngine's options that quire does not have, refused unless they ask for nothing."""

from collections.abc import Mapping

#: Of all layers with weights: parallelism over devices, and overlapping its communication, is PyTorch's own here.
PARALLEL = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "parallel_mode": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": None,
    "symmetric_ar_type": None,
}


class Unparallel:
    """What TransformerEngine's frameworks ask of a layer that is not split over devices."""

    #: Names of the layer's weights and of their biases.
    weight_names: tuple[str, ...] = ("weight",)
    bias_names: tuple[str, ...] = ("bias",)

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """Takes None and groups of one process, and raises NotImplementedError for others."""
        size = 1 if tp_group is None else tp_group.size()
        if size != 1:
            raise NotImplementedError(
                f"quire.{type(self).__name__}: tensor parallelism is not available in this version; got a group of "
                f"{size} processes. Use PyTorch's own parallel styles, which take this layer for a torch.nn.Linear"
            )


def refuse(what: str, options: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Raises TypeError for an option that is not known, NotImplementedError for one that is not at its known value."""
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}")
        if value != known[name]:
            raise NotImplementedError(
                f"{what}: {name}={value!r} is not available in this version; leave it at {known[name]!r}"
            )
