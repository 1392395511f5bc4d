"""torch.set_default_dtype and torch.set_default_device decide what parameters are made as, and nothing else."""

import pytest
import torch

import quire
from defaults import DEFAULTS, in_turn
from every_feature import FEATURES
from every_recipe import IN_ANY_PRECISION, STATIC, TABLE
from every_way import PLAIN, STEPS, allowed_under, setting, train_in, trained_under
from pairwise import pairwise
from steps import same


@pytest.mark.parametrize(
    ("feature", "recipe", "default"),
    pairwise(list(FEATURES), list(IN_ANY_PRECISION), list(DEFAULTS), allowed=allowed_under),
)
def test_a_model_made_and_trained_under_a_default_has_the_bits_of_one_that_was_not(feature, recipe, default):
    found, expected = trained_under(FEATURES[feature], IN_ANY_PRECISION[recipe], default)
    assert same(found, expected)


@pytest.mark.parametrize(("name", "default"), in_turn([*TABLE, *STATIC]))
def test_a_layer_with_any_recipe_has_the_bits_it_has_without_the_default(name, default):
    recipe = (TABLE | STATIC)[name]

    def run():
        torch.manual_seed(0)
        layer = quire.Linear(64, 32, recipe=STATIC.get(name), dtype=torch.float32, device="cpu")
        assert quire.rng_state(layer)[""].device.type == "cpu"
        if layer.input_scales():
            assert layer.input_scale.dtype == torch.float32 and not layer.input_scale.is_meta
            layer.load_state_dict(layer.state_dict() | {"input_scale": torch.tensor([0.0123456], **PLAIN)})
            assert layer.input_scale.item() == torch.tensor(0.0123456, **PLAIN).item()
        return train_in(layer, setting(recipe), [(i, 24, {}) for i in range(STEPS)])

    with DEFAULTS[default]():
        found = run()
    assert same(found, run())
