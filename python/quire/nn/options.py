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


def refuse(what: str, options: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Raises TypeError for an option that is not known, NotImplementedError for one that is not at its known value."""
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}")
        if value != known[name]:
            raise NotImplementedError(
                f"{what}: {name}={value!r} is not available in this version; leave it at {known[name]!r}"
            )
