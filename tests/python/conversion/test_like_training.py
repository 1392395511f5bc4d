"""quire.convert(for_inference=True, like="training"): converted models have the bits of training."""

import copy
import io
import pickle

import pytest
import torch

import quire
from every_recipe import DEFAULTS, OVERRIDDEN, VARIANTS, WEIGHT_ONLY, each

pytestmark = pytest.mark.any_device

every_recipe = each(DEFAULTS | VARIANTS | OVERRIDDEN | WEIGHT_ONLY)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), quire.LayerNormMLP(96, 64), quire.MoE(96, 32, 3))


def trainer(made, recipe):
    """The model as it is trained: layers quantize plain weights in every call."""
    return quire.convert(copy.deepcopy(made), recipe, min_features=1)


def server(made, recipe, **options):
    options = {"tokens": None, "min_features": 1, "like": "training"} | options
    return quire.convert(copy.deepcopy(made), recipe, for_inference=True, **options)


def trained(made, x):
    """What the forward pass of a training step gives: grad mode is on, and x wants a gradient."""
    return made(x.clone().requires_grad_()).detach()


@every_recipe
def test_a_server_gives_the_forward_pass_of_the_trainer(recipe, device, equal_bits):
    made, x = model().to(device), torch.randn(37, 64).to(device)
    expected = trained(trainer(made, recipe), x)
    served = server(made, recipe)
    with torch.no_grad():
        assert equal_bits(served(x), expected)
        quire.unpack_weights(served)
        assert equal_bits(served(x), expected)
        quire.prepack_weights(served)
        assert equal_bits(served(x), expected)


def exported(served, x):
    file = io.BytesIO()
    torch.export.save(torch.export.export(served, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)), file)
    file.seek(0)
    return torch.export.load(file).module()


WAYS = {
    "compiled": lambda served, x: torch.compile(served, backend="aot_eager", fullgraph=True),
    "exported": exported,
    "pickled": lambda served, x: pickle.loads(pickle.dumps(served)),
}


@pytest.mark.parametrize("way", WAYS)
@each({name: DEFAULTS[name] for name in ("mxfp8", "nvfp4")})
def test_so_does_a_server_that_is_captured_or_stored(recipe, way, device, equal_bits):
    made, x = model().to(device), torch.randn(37, 64).to(device)
    expected = trained(trainer(made, recipe), x)
    with torch.no_grad():
        assert equal_bits(WAYS[way](server(made, recipe), x)(x), expected)


def test_without_it_weights_of_nvfp4_have_smaller_blocks_and_other_bits(device, equal_bits):
    made, x = model().to(device), torch.randn(37, 64).to(device)
    other, same = server(made, "nvfp4", like=None), server(made, "nvfp4")
    assert "16x16" in same[0].weight.spec_text and "16x16" not in other[0].weight.spec_text
    with torch.no_grad():
        assert not equal_bits(other(x), same(x))


def test_it_says_where_it_has_no_meaning():
    made = torch.nn.Linear(64, 64)
    with pytest.raises(ValueError, match="like must be 'training' or None, got 'inference'"):
        quire.convert(made, "nvfp4", for_inference=True, like="inference", min_features=1)
    with pytest.raises(ValueError, match="pass for_inference=True, or leave like out"):
        quire.convert(made, "nvfp4", like="training", min_features=1)
    assert type(made) is torch.nn.Linear
