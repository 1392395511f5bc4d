"""torch.set_default_dtype and torch.set_default_device decide what parameters are made as, and nothing else."""

import contextlib

import pytest
import torch

import quire
from defaults import DEFAULTS, in_turn
from every_feature import FEATURES, Model
from every_recipe import IN_ANY_PRECISION, STATIC, TABLE, assert_same
from every_way import PLAIN, Setting, train
from pairwise import pairwise
from ranks import rank_of

STEPS = 3


def quantized(feature):
    return "quantized parameters" in feature or "stack" in feature


def allowed(feature, recipe, default):
    if default == "float64" and (quantized(feature) or feature == "converted"):
        return False  # codes are made of narrower values, and convert() leaves such a layer as it is
    if recipe == "high_precision":
        return not quantized(feature) and feature != "TransformerLayer"
    return recipe != "delayed" or "x kept" not in feature


def setting(recipe):
    return Setting(recipe, None, None, None, None, torch.device("cpu"))


def trained(feature, model, recipe):
    feature.ready(model)
    sizes = [max(24, feature.fewest)] * STEPS
    return train(model, setting(recipe), [(i, rows, feature.calls[i]) for i, rows in enumerate(sizes)])


@pytest.mark.parametrize(
    ("feature", "recipe", "default"), pairwise(list(FEATURES), list(IN_ANY_PRECISION), list(DEFAULTS), allowed=allowed)
)
def test_a_model_made_and_trained_under_a_default_has_the_bits_of_one_that_was_not(
    feature, recipe, default, equal_bits
):
    made, recipe = FEATURES[feature], IN_ANY_PRECISION[recipe]
    with rank_of(0, 2) if made.sharded else contextlib.nullcontext():
        torch.manual_seed(0)
        reference = Model(made.make(recipe))
        states = reference.state_dict(), quire.rng_state(reference)
        with DEFAULTS[default]():
            model = Model(made.make(recipe))
            if default == "meta":
                assert all(parameter.is_meta for parameter in model.parameters())
                model.to_empty(device="cpu")
            else:
                model.float()
            model.load_state_dict({name: value.clone() for name, value in states[0].items()})
            quire.set_rng_state(model, states[1])
            found = trained(made, model, recipe)
        assert_same(found, trained(made, reference, recipe), equal_bits)


@pytest.mark.parametrize(("name", "default"), in_turn([*TABLE, *STATIC]))
def test_a_layer_with_any_recipe_has_the_bits_it_has_without_the_default(name, default, equal_bits):
    recipe = (TABLE | STATIC)[name]

    def run():
        torch.manual_seed(0)
        layer = quire.Linear(64, 32, recipe=STATIC.get(name), dtype=torch.float32, device="cpu")
        assert quire.rng_state(layer)[""].device.type == "cpu"
        if layer.input_scales():
            assert layer.input_scale.dtype == torch.float32 and not layer.input_scale.is_meta
            layer.load_state_dict(layer.state_dict() | {"input_scale": torch.tensor([0.0123456], **PLAIN)})
            assert layer.input_scale.item() == torch.tensor(0.0123456, **PLAIN).item()
        return train(layer, setting(recipe), [(i, 24, {}) for i in range(STEPS)])

    with DEFAULTS[default]():
        found = run()
    assert_same(found, run(), equal_bits)
