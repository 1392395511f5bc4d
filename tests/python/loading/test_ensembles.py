"""Ensembles as PyTorch's tutorial has them: stack_module_state, and functional_call on a base on the meta device within
vmap. They compute what the models compute alone."""

import copy
import pickle

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

import quire
from every_feature import LAYERS
from every_recipe import ALL
from steps import call

pytestmark = pytest.mark.any_device

MODELS = 3
RECIPES = [*ALL, "none"]
#: Without what transforms of functions cannot pass: gradients that backward_dw() computes, and torch.utils.checkpoint.
NAMES = [name for name in LAYERS if name not in ("Linear, delayed wgrad", "LayerNormMLP, checkpointed")]


def result(layer, x, recipe, values=None):
    """y of a layer, or of one with other parameters and buffers."""
    with quire.autocast(recipe != "none", recipe=ALL.get(recipe)):
        if values is None:
            return call(layer, x)
        sizes = ([1, *[0] * (layer.num_gemms - 2), 15],) if isinstance(layer, quire.GroupedLinear) else ()
        return functional_call(layer, values, (x, *sizes))


def ensemble(name, to_meta):
    torch.manual_seed(0)
    models = [LAYERS[name]() for _ in range(MODELS)]
    return models, stack_module_state(models), to_meta(copy.deepcopy(models[0]))


def taken_to_meta(base):
    return base.to("meta")


def loaded_to_meta(base):
    """States stay behind on the CPU."""
    base.load_state_dict({key: value.to("meta") for key, value in base.state_dict().items()}, assign=True)
    return base


@pytest.mark.parametrize("to_meta", [taken_to_meta, loaded_to_meta], ids=lambda way: way.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_an_ensemble_computes_what_its_models_compute_alone(name, recipe, to_meta):
    models, (parameters, buffers), base = ensemble(name, to_meta)
    assert all(parameter.is_meta for parameter in base.parameters())
    x = torch.randn(MODELS, 16, 64)

    def run(parameters, buffers, x):
        return result(base, x, recipe, (parameters, buffers))

    before = torch.get_rng_state()
    y = vmap(run)(parameters, buffers, x)
    assert torch.equal(torch.get_rng_state(), before)
    expected = [result(model, one, recipe) for model, one in zip(models, x, strict=True)]
    # PyTorch multiplies by three routers in another order than by one.
    same = torch.testing.assert_close if name == "MoE" else assert_equal
    same(y, torch.stack(expected))
    assert all(not state.is_meta for state in quire.rng_state(base).values())

    y.square().sum().backward()
    for one in expected:
        one.square().sum().backward()
    # Stochastic rounding has the seed of the base; and what a router rounds otherwise may get another code.
    comparable = recipe != "nvfp4" and (name != "MoE" or recipe == "none")
    for key, parameter in models[0].named_parameters():
        assert (parameter.grad is None) == (parameters[key].grad is None)
        if parameter.grad is not None and comparable:
            same(parameters[key].grad, torch.stack([model.get_parameter(key).grad for model in models]))


def assert_equal(found, expected):
    assert torch.equal(found, expected)


MOVES = {
    "to meta": lambda layer: layer.to("meta"),
    "to meta and back": lambda layer: layer.to("meta").to_empty(device="cpu"),
    "to memory without values": lambda layer: layer.to_empty(device="cpu"),
    "to another dtype": lambda layer: layer.to(torch.bfloat16),
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "state dict": lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("name", LAYERS)
def test_no_move_and_no_copy_of_a_layer_draws_a_random_number_that_others_see(name, move):
    layer, before = LAYERS[name](), torch.get_rng_state()
    move(copy.deepcopy(layer))
    vmap(lambda x: (move(copy.deepcopy(layer)), x)[1], randomness="error")(torch.zeros(2))
    assert torch.equal(torch.get_rng_state(), before)


def of_each(loss):
    return vmap(grad(loss))


def of_the_sum(loss):
    return grad(lambda *given: vmap(loss)(*given).sum())


@pytest.mark.parametrize("transform", [of_each, of_the_sum], ids=lambda way: way.__name__)
@pytest.mark.parametrize("recipe", ["mxfp8", "delayed", "none"])
def test_gradients_of_each_model_of_an_ensemble(recipe, transform):
    models, (parameters, buffers), base = ensemble("LayerNormMLP", taken_to_meta)
    parameters = {name: value.detach() for name, value in parameters.items()}
    x = torch.randn(MODELS, 16, 64)

    def loss(parameters, buffers, x):
        return result(base, x, recipe, (parameters, buffers)).square().sum()

    found = transform(loss)(parameters, buffers, x)
    for model, one in zip(models, x, strict=True):
        result(model, one, recipe).square().sum().backward()
    for name in parameters:
        expected = torch.stack([model.get_parameter(name).grad for model in models])
        assert torch.equal(found[name], expected)


def test_a_gradient_through_quantize_within_vmap_is_refused_and_not_lost():
    x = torch.randn(MODELS, 32, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be batched by torch.func.vmap; use a loop"):
        vmap(lambda one: quire.quantize(one, "mxfp8").dequantize() + one)(x)
    with torch.no_grad():
        y = vmap(lambda one: quire.quantize(one, "mxfp8").dequantize() + one)(x)
        assert torch.equal(y, torch.stack([quire.quantize(one, "mxfp8").dequantize() + one for one in x]))
