"""Delayed scaling in two processes (gloo): amaxes are reduced by maximum, and DistributedDataParallel keeps states."""

import pytest

from python.delayed.distributed_ranks import uses_the_scales_of_the_largest_amax


@pytest.mark.slow
def test_two_ranks_use_the_scales_of_the_largest_amax(two):
    two.run(uses_the_scales_of_the_largest_amax)
