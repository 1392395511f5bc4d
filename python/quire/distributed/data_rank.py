"""Which data a rank has: ranks of different data round with different random numbers."""

import contextlib
import threading
from collections.abc import Iterator

from quire.checks import check_type


class _State(threading.local):
    def __init__(self) -> None:
        self.rank: int | None = None


_STATE = _State()


@contextlib.contextmanager
def data_parallel_rank(rank: int) -> Iterator[None]:
    """Layers that are made, converted or reset within this context get this data-parallel rank, for stochastic
    rounding. Layers with equal data-parallel rank, made after the same torch.manual_seed, draw the same random numbers.
    Layers with different data-parallel ranks draw different ones. A layer keeps its data-parallel rank when it is reset
    later. The context holds for this thread.

    Without this context, the data-parallel rank is the rank in torch.distributed's default group. For a layer that is
    sharded over a group, it is the rank that the first member of the group has in the default group.

    Args:
        rank: a number that says on which data the layers compute, such as mesh["dp"].get_local_rank(). All ranks of a
            tensor-parallel group compute on the same tokens, so they must pass the same number. If the tokens are
            sharded and the layer is not (sequence parallelism), pass torch.distributed.get_rank().

    Raises:
        TypeError: if rank is not an int of 0 or more.
        ValueError: if rank is not an int of 0 or more.
    """
    check_type("data_parallel_rank", int, rank=rank)
    if rank < 0:
        raise ValueError(f"data_parallel_rank: rank must be 0 or more, got {rank}")
    outer, _STATE.rank = _STATE.rank, rank
    try:
        yield
    finally:
        _STATE.rank = outer


def declared_rank() -> int | None:
    """The rank of the innermost data_parallel_rank(), or None."""
    return _STATE.rank
