"""Two processes (gloo) train to the result of one, with DistributedDataParallel and FSDP2, and round differently."""

import pytest

from python.distributed.data_parallel_ranks import seeds, trains_as_one_process, trains_with_flat_parameters


@pytest.mark.slow
def test_two_ranks_train_as_one_process(two):
    two.run(trains_as_one_process)


@pytest.mark.slow
def test_two_ranks_with_flat_parameters_train_as_one_process(two):
    two.run(trains_with_flat_parameters)


def test_the_data_parallel_rank_is_set_for_layers_that_are_not_sharded(two):
    """docs/distributed.md: the defaults are right for a model all of whose layers are sharded."""
    (default, within), (default_1, within_1) = two.run(seeds)
    assert default[0] == default_1[0] == within[0] == within_1[0]
    assert default[1] != default_1[1] and within[1] == within_1[1]
