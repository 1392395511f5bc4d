"""Layers whose weights or experts are divided over the processes of a torch.distributed group."""

from quire.distributed.groups import name_group
from quire.distributed.parallel import Parallel
from quire.distributed.styles import ColumnParallel, ExpertParallel, RowParallel

__all__ = ["ColumnParallel", "ExpertParallel", "Parallel", "RowParallel", "name_group"]
