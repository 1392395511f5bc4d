"""Layers whose weights are divided over the processes of a torch.distributed group."""

from quire.distributed.groups import name_group
from quire.distributed.parallel import Parallel
from quire.distributed.sharded_model import shard_weights
from quire.distributed.sharding import gather_codes
from quire.distributed.styles import ColumnParallel, RowParallel

__all__ = ["ColumnParallel", "Parallel", "RowParallel", "gather_codes", "name_group", "shard_weights"]
