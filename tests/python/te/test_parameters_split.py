"""parameters_split of quire.te.Linear and LayerNormLinear: parts of the outputs as parameters of their own."""

import copy
import pickle

import pytest
import torch

import quire
from quire import te

PARTS = {"q": 32, "k_": 16, "v": 16}


@pytest.fixture
def make_pair():
    """Layers with the same values, whole and in parts."""

    def make(parts=PARTS, dtype=torch.bfloat16, bias=True, kind=te.Linear):
        layers = []
        for options in ({}, {"parameters_split": parts}):
            torch.manual_seed(1)
            layers.append(kind(96, 64, bias=bias, params_dtype=dtype, **options))
        return layers

    return make


def test_parts_have_names_and_the_values_of_the_whole(make_pair):
    whole, split = make_pair()
    assert {name: tuple(p.shape) for name, p in split.named_parameters()} == {
        **{"q_weight": (32, 96), "k_weight": (16, 96), "v_weight": (16, 96)},
        **{"q_bias": (32,), "k_bias": (16,), "v_bias": (16,)},
    }
    assert split.weight_names == ("q_weight", "k_weight", "v_weight") and split.bias_names[1] == "k_bias"
    assert torch.equal(split.weight, whole.weight) and torch.equal(split.bias, whole.bias)
    split.load_state_dict({name: value + 1 for name, value in split.state_dict().items()})
    assert torch.equal(split.weight, whole.weight + 1)
    torch.manual_seed(1)
    split.reset_parameters()
    assert torch.equal(split.weight, whole.weight) and torch.equal(split.sr_state, whole.sr_state)
    _, equal_parts = make_pair(("a", "b"), bias=False)
    assert {name: len(p) for name, p in equal_parts.named_parameters()} == {"a_weight": 32, "b_weight": 32}
    assert equal_parts.bias is None and equal_parts.bias_names == ()


def gradients_of_the_whole(layer, called, x, recipe):
    """y and the gradients of x, of the whole weight and of the whole bias. called: the layer, or it compiled."""
    layer.zero_grad()
    layer.sr_state[1] = 0
    with quire.autocast(recipe=recipe):
        y = called(x)
    y.square().sum().backward()
    parts = [[getattr(layer, name).grad for name in names] for names in (layer.weight_names, layer.bias_names)]
    return y, x.grad, *[torch.cat(part) for part in parts]


def test_a_step_has_the_bits_of_the_whole_layer(make_pair, make_x, any_recipe, compiler, equal_bits):
    whole, split = make_pair()
    for function in (split, compiler(split)):
        results = []
        for layer, called in ((whole, whole), (split, function)):
            results.append(gradients_of_the_whole(layer, called, make_x(48, 96), any_recipe))
        assert all(equal_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("kind", "parameters"), [(te.Linear, 6), (te.LayerNormLinear, 8)])
def test_copies_and_pickles_are_split(make_pair, kind, parameters):
    _, split = make_pair(kind=kind)
    for other in (copy.deepcopy(split), pickle.loads(pickle.dumps(split)), split.to(torch.float32)):
        assert torch.equal(other.weight, split.weight) and len(list(other.parameters())) == parameters


def test_a_layer_with_a_norm_computes_as_the_whole_one(make_pair, make_x, compiler, equal_bits):
    whole, split = make_pair(kind=te.LayerNormLinear)
    assert {name for name, _ in split.named_parameters()} == {
        *("layer_norm_weight", "layer_norm_bias", "q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias")
    }
    with torch.no_grad():
        split.layer_norm_weight.mul_(3)
    split.load_state_dict(make_pair(kind=te.LayerNormLinear)[1].state_dict())
    with torch.no_grad():
        split.layer_norm_bias.add_(1)
    torch.manual_seed(1)
    split.reset_parameters()
    for function in (split, compiler(split)):
        results = []
        for layer, called in ((whole, whole), (split, function)):
            found = gradients_of_the_whole(layer, called, make_x(48, 96), "nvfp4")
            results.append((*found, layer.layer_norm_weight.grad, layer.layer_norm_bias.grad))
        assert all(equal_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_for_inference_a_layer_of_parts_is_left_in_words(make_pair, kind):
    model = torch.nn.Sequential(make_pair(kind=kind)[1], torch.nn.Linear(64, 32))
    x, before = torch.randn(3, 96), copy.deepcopy(model)
    quire.convert(model.float(), "mxfp8", for_inference=True, tokens=None, min_features=0)
    with pytest.raises(
        ValueError, match="its weight consists of several parameters, and must be one: create the layer"
    ):
        quire.convert(model[:1], "mxfp8", for_inference=True, tokens=None, min_features=0)
    assert torch.equal(model[0](x), before.float()[0](x)) and isinstance(model[1].weight, quire.QuantizedTensor)


def test_kept_codes_of_a_changed_part_are_refused(make_pair, make_x):
    _, split = make_pair()
    quire.quantize_weights(split, quire.recipe.MXFP8BlockScaling())
    with quire.autocast():
        split(make_x(4, 96))
        with torch.no_grad():
            split.v_weight[0, 0] += 1
        with pytest.raises(RuntimeError, match="cached codes are stale"):
            split(make_x(4, 96))


@pytest.mark.parametrize(
    "parts", ["abc", (), 3, ("a", "a"), ("a", "b", "c"), ("_", "b"), {"a": 63}, {"a": 64.0}, {"a": -1, "b": 65}]
)
def test_parts_that_do_not_fit_are_refused_in_words(parts):
    with pytest.raises(ValueError, match="parameters_split must be different names .* out_features = 64; got"):
        te.Linear(96, 64, parameters_split=parts)


def test_what_does_not_go_with_parts_is_refused_in_words():
    with pytest.raises(NotImplementedError, match="parameters_split: fuse_wgrad_accumulation=True is not available"):
        te.Linear(96, 64, parameters_split=("a", "b"), fuse_wgrad_accumulation=True)
    with quire.quantized_model_init(), pytest.raises(NotImplementedError, match="within quantized_model_init; use a"):
        te.Linear(96, 64, parameters_split=("a", "b"))

    class Own(te.Linear):
        pass

    with pytest.raises(NotImplementedError, match="in Own, a subclass; use a layer for each part"):
        Own(96, 64, parameters_split=("a", "b"))


def test_a_call_joins_its_parts_once(monkeypatch):
    layer, joined, cat = te.Linear(64, 32, parameters_split=("q", "k")), [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, *args: joined.append(len(tensors)) or cat(tensors, *args))
    with quire.autocast(recipe="mxfp8"):
        layer(torch.randn(8, 64))
    assert joined == [2, 2]  # the weight and the bias
