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
    """Layers that are made, converted or reset within this context round stochastically as those of that data-parallel
    rank. Layers of equal rank, made after the same torch.manual_seed, draw the same random numbers; layers of different
    ranks draw different ones. Per thread. A layer remembers the rank, and goes on with it when it is reset later.

    rank: says which data is computed on here, such as mesh["dp"].get_local_rank(). Ranks of a tensor-parallel group
        compute on the same tokens, so pass the same number in all of them. Around a layer that is not sharded and
        computes on tokens that are (sequence parallelism), pass one that no other rank passes, such as
        torch.distributed.get_rank().

    Without it the number is the rank in torch.distributed's default group, and for a layer that is sharded over a group
    the rank of the first member of that group. Raises TypeError or ValueError for what is no int of 0 or more.
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
