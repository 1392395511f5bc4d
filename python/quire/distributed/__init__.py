"""Layers whose weights, experts or training states are sharded over the ranks of a torch.distributed group."""

import importlib
from typing import TYPE_CHECKING

from quire.distributed.data_parallel import data_parallel_rank, shard_weights
from quire.distributed.fully_sharded import gather_codes
from quire.distributed.groups import name_group
from quire.distributed.one_process import exact
from quire.distributed.parallel import Parallel

if TYPE_CHECKING:
    from quire.distributed.styles import ColumnParallel, ExpertParallel, RowParallel

__all__ = [
    "ColumnParallel",
    "ExpertParallel",
    "Parallel",
    "RowParallel",
    "data_parallel_rank",
    "exact",
    "gather_codes",
    "name_group",
    "shard_weights",
]


def __getattr__(name: str) -> object:
    if name in ("ColumnParallel", "ExpertParallel", "RowParallel"):  # subclasses of what takes long to import
        return getattr(importlib.import_module("quire.distributed.styles"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
