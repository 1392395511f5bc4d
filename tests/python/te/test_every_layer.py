"""What the tests of every layer say, they say of the layers that only quire.te has: each is called here with their
names in its table."""

import pytest
import torch

import every_feature
from every_recipe import IN_ANY_PRECISION
from python.conversion import test_convert, test_reparametrized, test_state_precision
from python.delayed import test_state
from python.loading import test_ensembles
from python.nn import test_leaving_meta, test_own_recipe
from python.recipe import test_weight_only
from python.te.te_features import LAYERS
from quire import te

pytestmark = pytest.mark.any_device
every_layer = pytest.mark.parametrize("name", LAYERS)


class Rotary(te.TransformerLayer):
    """With the angles' frequencies, as models hold them."""

    def __init__(self):
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
        super().__init__(64, 96, 4, softmax_type="learnable", **options)
        self.rotary = te.RotaryPositionEmbedding(16)


HOLDERS = {
    "Linear, split": LAYERS["Linear, split"],
    "TransformerLayer": Rotary,
    "te.ops": lambda: te.ops.Sequential(te.ops.Quantize(), te.ops.Linear(64, 32), te.ops.Quantize()),
}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """In the tables of the other tests."""
    for name, make in LAYERS.items():
        monkeypatch.setitem(every_feature.LAYERS, name, make)
    for name, make in HOLDERS.items():
        monkeypatch.setitem(test_state_precision.HOLDERS, name, make)


@every_layer
@pytest.mark.parametrize("recipe", IN_ANY_PRECISION)
def test_it_trains_after_the_meta_device_as_if_it_was_never_there(name, recipe):
    check = test_leaving_meta.test_what_left_the_meta_device_does_not_train_otherwise_than_what_was_never_there
    check(name, IN_ANY_PRECISION[recipe])


@pytest.mark.cpu_only
@every_layer
@pytest.mark.parametrize("way", test_leaving_meta.WAYS)
def test_no_state_stays_behind_on_the_meta_device(name, way):
    test_leaving_meta.test_no_state_stays_behind_on_the_meta_device(name, test_leaving_meta.WAYS[way])


@every_layer
@pytest.mark.parametrize("to_meta", [test_ensembles.taken_to_meta, test_ensembles.loaded_to_meta])
@pytest.mark.parametrize("recipe", test_ensembles.RECIPES)
def test_an_ensemble_computes_what_its_models_compute_alone(name, recipe, to_meta):
    test_ensembles.test_an_ensemble_computes_what_its_models_compute_alone(name, recipe, to_meta)


@every_layer
@pytest.mark.parametrize("move", test_ensembles.MOVES)
def test_no_move_and_no_copy_draws_a_random_number_that_others_see(name, move):
    check = test_ensembles.test_no_move_and_no_copy_of_a_layer_draws_a_random_number_that_others_see
    check(name, test_ensembles.MOVES[move])


@every_layer
def test_what_is_assigned_as_the_recipe_is_checked_then(name):
    test_own_recipe.test_what_is_assigned_as_the_recipe_is_checked_then(name)


@every_layer
def test_it_is_not_left_without_the_recipe(name, equal_bits):
    test_convert.test_no_layer_of_quire_is_left_without_the_recipe(name, equal_bits)


@pytest.mark.cpu_only
@every_layer
@pytest.mark.parametrize("how", test_reparametrized.OF_EVERY_LAYER)
def test_it_computes_with_computed_weights(name, how, equal_bits):
    layer = test_reparametrized.compared_with_computed_weights(name, how, equal_bits)[0]
    with pytest.raises(ValueError, match="its weight consists of several parameters"):
        test_reparametrized.WAYS["convert"](torch.nn.Sequential(layer))


@every_layer
def test_it_computes_as_with_decoded_weights(name):
    test_weight_only.test_every_layer_computes_as_with_decoded_weights(name)


@every_layer
def test_it_does_not_forget_its_scales_at_a_checkpoint(name):
    test_state.test_no_layer_forgets_its_scales_at_a_checkpoint(name)


@pytest.mark.parametrize(
    ("holder", "conversion"), list(test_state_precision.pairs(HOLDERS, whole={"TransformerLayer"}))
)
def test_what_is_no_parameter_keeps_its_dtype_and_its_bits(holder, conversion, equal_bits):
    test_state_precision.test_what_is_no_parameter_keeps_its_dtype_and_its_bits(holder, conversion, equal_bits)
