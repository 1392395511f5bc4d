"""Layers whose weights are divided over the processes of a torch.distributed group."""

from quire.distributed.groups import name_group
from quire.distributed.parallel import Parallel

__all__ = ["Parallel", "name_group"]
