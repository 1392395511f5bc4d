"""Two processes (gloo) train to the result of one, with DistributedDataParallel and FSDP2, and round differently."""

import pytest

from python.distributed.data_parallel_ranks import trains_as_one_process


@pytest.mark.slow
def test_two_ranks_train_as_one_process(two):
    two.run(trains_as_one_process)
