"""Layers whose weights, experts or training states are sharded over the ranks of a torch.distributed group."""

from quire.distributed.data_rank import data_parallel_rank
from quire.distributed.groups import name_group
from quire.distributed.one_process import exact
from quire.distributed.parallel import Parallel
from quire.distributed.sharded_model import shard_weights
from quire.distributed.sharding import gather_codes
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
