"""Collectives that write to a quantized tensor: they refuse, with the remedy, and write to views of it."""

import pytest

from python.distributed import received_ranks

SPECS = ["mxfp8", "nvfp4:16x16", "fp8_block"]
CLAIMS = [
    received_ranks.refuses,
    received_ranks.reads,
    received_ranks.copies,
    received_ranks.follows_remedies,
    received_ranks.writes_through_views,
    received_ranks.refuses_views,
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_two_ranks(two, claim, spec):
    two.run(claim, spec)
