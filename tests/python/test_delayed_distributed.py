"""Delayed scaling in two processes (gloo): amaxes are reduced by maximum, and DistributedDataParallel keeps states."""

import pytest


@pytest.mark.alone
@pytest.mark.slow
def test_two_ranks_use_the_scales_of_the_largest_amax(two_ranks):
    two_ranks("delayed_ranks.py")
