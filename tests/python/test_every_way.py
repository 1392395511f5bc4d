"""Every feature gives the bits of eager mode whatever way it is run, and compiled in as few graphs as it has kinds of
calls."""

import pytest

from every_feature import FEATURES
from every_way import Table, gives_the_bits_of_eager_mode

TABLE = Table(FEATURES, {"all of one process": False, "all shards": True})


@pytest.mark.parametrize(("feature", "way", "recipe"), TABLE.cases())
@pytest.mark.filterwarnings("ignore:.*fork.*", "ignore:The tensor attributes .*microbatch_weight")
def test_a_feature_gives_the_bits_of_eager_mode(feature, way, recipe, compiler, device, surroundings):
    gives_the_bits_of_eager_mode(TABLE.feature(feature, way, recipe), way, recipe, surroundings)
