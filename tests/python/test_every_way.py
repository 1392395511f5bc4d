"""Every feature gives the bits of eager mode whatever way it is run, and compiled in as few graphs as it has kinds of
calls."""

import pytest

from every_feature import FEATURES
from every_way import WAYS, Table, gives_the_bits_of_eager_mode

TABLE = Table(FEATURES, {"all of one process": False, "all shards": True})


@pytest.mark.parametrize(("feature", "way", "recipe"), TABLE.cases())
@pytest.mark.filterwarnings("ignore:.*fork.*", "ignore:The tensor attributes .*microbatch_weight")
def test_a_feature_gives_the_bits_of_eager_mode(feature, way, recipe, compiler, device, surroundings):
    gives_the_bits_of_eager_mode(TABLE.feature(feature, way, recipe), way, recipe, surroundings)


@pytest.mark.parametrize("lacking", ["quiretest", "cuda"])
def test_another_device_has_every_feature_and_every_way_under_every_recipe(lacking):
    """But for those that it lacks."""

    def shown(cases):
        everywhere = [
            case for case in cases if lacking not in WAYS[case[1]].missing and lacking not in FEATURES[case[0]].missing
        ]
        return {(name, recipe) for feature, way, recipe in everywhere for name in (feature, way)}

    cases = [case for case in (tuple(getattr(case, "values", case)) for case in TABLE.cases()) if case[0] in FEATURES]
    some = TABLE.of_devices(cases)
    assert shown(some) == shown(cases) and len(some) < len(cases) / 3
