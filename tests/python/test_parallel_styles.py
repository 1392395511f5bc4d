"""Layers that PyTorch's parallelize_module has divided over two processes, compared with one process."""

import itertools

import pytest

from every_recipe import TABLE
from parallel_layers import Case
from ranks import Ranks
from style_ranks import STYLES, layer_equals_one_process

DIVIDED = list(itertools.product(("column", "row"), (False, True)))
#: One for each way in which scales follow from a tensor, and for the random stream.
SOME = ("high_precision", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed")


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("kind", STYLES)
@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize("recipe", TABLE)
def test_results_are_those_of_one_process(two, recipe, mode, sequence, kind):
    # Of two processes each: whole blocks, blocks that both share, one token, none, three dimensions.
    for tokens in ((256,), (14,), (2,), (0,), (6, 5)):
        two.run(layer_equals_one_process, kind, Case(recipe, "Linear", mode, sequence, tokens))
