"""Layers whose weights or experts are divided over the processes of a torch.distributed group."""

from quire.distributed.data_rank import data_parallel_rank
from quire.distributed.groups import name_group
from quire.distributed.one_process import exact
from quire.distributed.parallel import Parallel
from quire.distributed.styles import ColumnParallel, ExpertParallel, RowParallel

__all__ = ["ColumnParallel", "ExpertParallel", "Parallel", "RowParallel", "data_parallel_rank", "exact", "name_group"]
