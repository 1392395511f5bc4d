"""TransformerEngine's arguments of tensor and sequence parallelism, as quire.distributed.Parallel."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from quire.checks import check_type, check_type_or_none, describe
from quire.distributed import check_ranks
from quire.distributed.groups import group_size
from quire.distributed.parallel import MODES, Parallel
from quire.te.arguments import DIVIDING, IN_PIECES, USER_BUFFERS, refuse, signature_with

#: LayerNormMLP has this one instead of parallel_mode.
MLP_DIVIDING = {name: value for name, value in DIVIDING.items() if name != "parallel_mode"} | {
    "set_parallel_mode": False
}
_TRACKER = "model-parallel-rng"


def divides(construct: Callable[..., None], what: str, known: dict[str, object]) -> Callable[..., None]:
    """A constructor that takes TransformerEngine's arguments `known` and passes what they ask for as parallel=.

    tp_group, tp_size, sequence_parallel, and parallel_mode "column" or "row" (of LayerNormMLP set_parallel_mode) are
    those of quire.distributed.Parallel. Groups of one process ask for nothing. tp_size alone: the layer gets its group
    by set_tensor_parallel_group(), and each rank draws its part alone, from the tracker. get_rng_state_tracker: the
    weight is drawn within get_rng_state_tracker().fork(rng_tracker_name), so that ranks may draw different ones.
    ub_overlap_*: overlap="ring"; the other ub_* change nothing then. They go with sequence_parallel, otherwise
    NotImplementedError is raised for them.
    """

    @functools.wraps(construct)
    def __init__(self: object, *args: object, **keywords: object) -> None:
        parallel, drawing = _taken(what, keywords, known)
        if parallel is not None:
            keywords["parallel"] = parallel
        with drawing:
            construct(self, *args, **keywords)

    __init__.__signature__ = signature_with(construct, known)
    return __init__


def divides_shapes(construct: Callable[..., None], what: str, known: dict[str, object]) -> Callable[..., None]:
    """The same of a GroupedLinear, whose weights alone are sharded, as in TransformerEngine: nothing is sent. y of a
    "row" layer and the gradient of x of a "column" layer are this rank's shard of a sum, which the caller adds up,
    and scales follow from this rank's shard of an operand. Raises NotImplementedError for a bias."""

    @functools.wraps(construct)
    def __init__(
        self: object, num_gemms: int, in_features: int, out_features: int, *args: object, **keywords: object
    ) -> None:
        parallel, drawing = _taken(what, keywords, known)
        if parallel is not None:
            in_features, out_features = parallel.sizes(what, in_features, out_features)
            if keywords.get("bias", True):
                raise NotImplementedError(
                    f"{what}: a layer that is sharded over ranks has no bias, which would be added once for each "
                    "rank; pass bias=False"
                )
            self.drawn_as = parallel
        with drawing:
            construct(self, num_gemms, in_features, out_features, *args, **keywords)

    __init__.__signature__ = signature_with(construct, known)
    return __init__


def _taken(
    what: str, keywords: dict[str, object], known: dict[str, object]
) -> tuple[Parallel | None, contextlib.AbstractContextManager[object]]:
    """What the arguments `known` ask for, which are taken out of the keywords, and where weights are to be drawn."""
    given = known | {name: keywords.pop(name) for name in known if name in keywords}
    parallel, tracker = _parallel(what, given, keywords.get("device")), given["get_rng_state_tracker"]
    if parallel is None or not tracker:
        return parallel, contextlib.nullcontext()
    return parallel, _drawing(tracker().fork(given["rng_tracker_name"] or _TRACKER))


@contextlib.contextmanager
def _drawing(fork: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Within a tracker's state, which may be another one in each rank."""
    with fork, check_ranks.own_draws():
        yield


def _parallel(what: str, given: dict[str, object], device: object) -> Parallel | None:
    group, mode = given["tp_group"], given.get("parallel_mode", "column" if given.get("set_parallel_mode") else None)
    size = given["tp_size"] if group is None else group_size(group)
    check_type(what, bool, sequence_parallel=given["sequence_parallel"])
    check_type(what, int, tp_size=given["tp_size"])
    check_type_or_none(what, Callable, get_rng_state_tracker=given["get_rng_state_tracker"])
    if mode not in (None, *MODES):
        raise NotImplementedError(f"{what}: parallel_mode={mode!r} is not available; use 'column', 'row' or None")
    if size == 0:
        raise TypeError(f"{what}: tp_group must be a process group of torch.distributed or None, got {describe(group)}")
    if size != 1 and group is None and mode is None:
        raise NotImplementedError(
            f"{what}: tp_size={size} without tp_group is not available without parallel_mode; pass parallel_mode, and "
            "the group here or to set_tensor_parallel_group"
        )
    on_meta = device is not None and torch.device(device).type == "meta"
    if size != 1 and group is None and not (given["get_rng_state_tracker"] or on_meta):
        raise NotImplementedError(
            f"{what}: tp_size={size} without tp_group is not available without get_rng_state_tracker: all ranks "
            "would draw the same part of the weight; pass tp_group, or a tracker whose states differ between "
            "ranks, or device='meta'"
        )
    overlaps = {name: given[name] for name in USER_BUFFERS if name in given}
    if size == 1 or mode is None:
        refuse(what, overlaps, USER_BUFFERS)
        return None
    return Parallel(
        mode, group, given["sequence_parallel"], size, overlap=_overlap(what, overlaps, given["sequence_parallel"])
    )


def _overlap(what: str, given: dict[str, object], sequence: bool) -> str | None:
    """Parallel.overlap that arguments of USER_BUFFERS ask for."""
    check_type(what, bool, **{name: value for name, value in given.items() if name != "ub_name"})
    check_type_or_none(what, str, ub_name=given.get("ub_name"))
    asked = [name for name, value in given.items() if value != USER_BUFFERS[name]]
    if asked and not sequence:
        raise NotImplementedError(
            f"{what}: {asked[0]}={given[asked[0]]!r} overlaps the exchange of tokens, and is not available without "
            "sequence_parallel=True"
        )
    return "ring" if any(given.get(name) for name in IN_PIECES) else None
