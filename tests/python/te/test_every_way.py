"""What only quire.te has gives the bits of eager mode whatever way it is run, and under any default of the process."""

import pytest

from defaults import DEFAULTS
from every_recipe import IN_ANY_PRECISION
from every_way import Table, allowed, allowed_under, gives_the_bits_of_eager_mode, trained_under
from pairwise import pairwise
from python.te.te_features import FEATURES
from steps import same


def own_allowed(feature, way, recipe):
    if feature == "TransformerLayer" and recipe == "high_precision":
        return False  # the last bits of PyTorch's matmuls depend on the alignment of loaded weights
    # PyTorch's attention asks whether there are rows, and Inductor's own sums differ in last bits.
    return allowed(feature, way, recipe) and (feature, way) not in (
        ("TransformerLayer", "unbacked"),
        ("TransformerLayer", "inductor"),
    )


def own_allowed_under(feature, recipe, default):
    own = recipe != "high_precision" or feature != "TransformerLayer"
    return own and allowed_under(feature, recipe, default)


TABLE = Table(FEATURES, {"all of quire.te": False}, own_allowed)


@pytest.mark.parametrize(("feature", "way", "recipe"), TABLE.cases())
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_feature_gives_the_bits_of_eager_mode(feature, way, recipe, compiler, device, surroundings):
    gives_the_bits_of_eager_mode(TABLE.feature(feature, way, recipe), way, recipe, surroundings)


@pytest.mark.parametrize(
    ("feature", "recipe", "default"),
    pairwise(list(FEATURES), list(IN_ANY_PRECISION), list(DEFAULTS), allowed=own_allowed_under),
)
def test_a_model_made_and_trained_under_a_default_has_the_bits_of_one_that_was_not(feature, recipe, default):
    found, expected = trained_under(FEATURES[feature], IN_ANY_PRECISION[recipe], default)
    assert same(found, expected)
