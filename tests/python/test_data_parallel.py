"""Two processes (gloo) train to the result of one, with DistributedDataParallel and FSDP2, and round differently."""

import pytest


@pytest.mark.alone
@pytest.mark.slow
def test_two_ranks_train_as_one_process(two_ranks):
    two_ranks("data_parallel_ranks.py")
