"""quire.convert(for_inference=True, gradients="input"): backward through quantized weights, as adapters need it; and
quire.dequantize_weights(), which gives plain weights again."""

import copy
import pickle

import pytest
import torch

import quire
from every_feature import LAYERS
from every_recipe import DEFAULTS, each
from steps import blocks

pytestmark = pytest.mark.any_device

every_recipe = each(DEFAULTS)
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear, one weight")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def converted(model, recipe, **options):
    return quire.convert(model, recipe, for_inference=True, tokens=None, min_features=1, **options)


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Linear(64, 32, dtype=dtype)


def gradient(model, x, dy, function=None):
    x = x.detach().clone().requires_grad_()
    (function or model)(x).backward(dy)
    return x.grad


@dtypes
@every_recipe
def test_the_gradient_of_x_is_the_product_with_the_decoded_weight(recipe, dtype, equal_bits):
    layer = converted(linear(dtype), recipe, gradients="input")
    x, dy = torch.randn(5, 64).to(dtype), torch.randn(5, 32).to(dtype)
    values = layer.weight.detach().dequantize()
    assert values.dtype == dtype and equal_bits(gradient(layer, x, dy), dy @ values)
    assert [p.grad for p in layer.parameters()] == [None, None]


@every_recipe
def test_the_bits_of_forward_are_those_without_gradients(recipe, equal_bits):
    x = torch.randn(5, 256)
    plain, trained = converted(blocks(), recipe), converted(blocks(), recipe, gradients="input")
    with torch.no_grad():
        expected = plain(x)
    assert equal_bits(trained(x).detach(), expected)
    assert equal_bits(trained(x.requires_grad_()).detach(), expected)
    trained.load_state_dict(plain.state_dict())  # the same names and codes


@pytest.mark.parametrize("kind", KINDS)
@every_recipe
def test_layers_of_quire_give_the_gradient_of_weights_decoded_in_every_call(recipe, kind, equal_bits):
    torch.manual_seed(0)
    model = torch.nn.Sequential(LAYERS[kind]())
    function = (lambda own: lambda x: own[0](x, [1, x.shape[0] - 1])) if "Grouped" in kind else (lambda own: own)
    x = torch.randn(7, 64)
    dy = torch.randn_like(function(model)(x))
    own = converted(copy.deepcopy(model), recipe, gradients="input")
    text = own[0].recipe.linear_spec()
    assert text.endswith(",backward=dequantized")
    in_every_call = quire.convert(model, text)
    assert equal_bits(gradient(own, x, dy, function(own)), gradient(in_every_call, x, dy, function(in_every_call)))


WAYS = {
    "compiled": lambda model, compiler: compiler(model),
    "deepcopy": lambda model, compiler: copy.deepcopy(model),
    "pickle": lambda model, compiler: pickle.loads(pickle.dumps(model)),
    "checkpointed": lambda model, compiler: lambda x: quire.checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_gradients_are_the_same_in_each_way(recipe, way, compiler, equal_bits):
    model = converted(blocks(), recipe, gradients="input")
    x, dy = torch.randn(5, 256), torch.randn(5, 256)
    assert equal_bits(gradient(model, x, dy, WAYS[way](model, compiler)), gradient(model, x, dy))


def test_no_rows_and_strided_rows(equal_bits):
    layer = converted(linear(), "nvfp4", gradients="input")
    assert gradient(layer, torch.randn(0, 64), torch.randn(0, 32)).shape == (0, 64)
    x, dy = torch.randn(64, 6).T, torch.randn(32, 6).T
    assert equal_bits(gradient(layer, x, dy), gradient(layer, x.contiguous(), dy.contiguous()))


def test_a_model_that_is_converted_already_gets_gradients_by_another_call(equal_bits):
    x, dy = torch.randn(5, 64), torch.randn(5, 32)
    layer = converted(linear(), "mxfp8")
    with pytest.raises(RuntimeError, match=r'gradient of x.*gradients="input"'):
        gradient(layer, x, dy)
    values = layer.weight.detach().dequantize()
    converted(layer, "mxfp8", gradients="input")
    assert equal_bits(layer.weight.detach().dequantize(), values)
    assert equal_bits(gradient(layer, x, dy), gradient(converted(linear(), "mxfp8", gradients="input"), x, dy))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_recipe_of_autocast_that_needs_other_codes_is_named_as_the_cause(recipe, compiler):
    layer, x = converted(linear(), recipe, gradients="input"), torch.randn(5, 64)
    words = "quire.Linear: the recipe of quire.autocast, .*BlockScaling, replaces .*: run the model outside of"
    for function in (layer, compiler(layer)):
        with quire.autocast(recipe=recipe), pytest.raises(RuntimeError, match=words):
            function(x.requires_grad_())
    with quire.autocast(recipe="mxfp8"):
        assert converted(linear(), "mxfp8", gradients="input")(torch.randn(5, 64)).shape == (5, 32)
    assert gradient(layer, x.detach(), torch.randn(5, 32)).shape == x.shape


def test_a_recipe_that_says_what_backward_needs_is_kept():
    for text in ("x=none,w=nvfp4,dy=none", "x=mxfp8,w=mxfp8,dy=mxfp8,backward=high_precision"):
        layer = converted(linear(), text, gradients="input")
        assert layer.recipe == converted(linear(), text).recipe


def test_weights_quantized_with_sample_data_have_gradients_too(equal_bits):
    model = torch.nn.Sequential(linear())
    quire.quantize_model(model, "nvfp4", [torch.randn(64, 64)], method="gptq", gradients="input")
    x, dy = torch.randn(5, 64), torch.randn(5, 32)
    assert equal_bits(gradient(model, x, dy), dy @ model[0].weight.detach().dequantize())


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"gradients": "weight"}, ValueError, "gradients must be None or 'input', got 'weight'"),
        ({"gradients": True}, TypeError, 'gradients must be "input" or None, got True'),
        ({"gradients": "input", "for_inference": False}, ValueError, "needs for_inference=True"),
    ],
)
def test_other_values_are_refused_and_change_nothing(options, kind, words):
    layer = linear()
    with pytest.raises(kind, match=words):
        quire.convert(layer, "mxfp8", **{"for_inference": True, "tokens": None, "min_features": 1} | options)
    assert type(layer) is torch.nn.Linear
    if "for_inference" not in options:
        with pytest.raises(kind, match=words):
            quire.quantize_model(layer, "mxfp8", **options)


@dtypes
@every_recipe
def test_dequantized_weights_compute_as_their_values(recipe, dtype, equal_bits):
    layer, x = converted(linear(dtype), recipe), torch.randn(5, 64).to(dtype)
    values = layer.weight.detach().dequantize()
    assert quire.dequantize_weights(layer) is layer
    assert type(layer.weight) is torch.nn.Parameter and not layer.weight.requires_grad and layer.recipe is None
    assert equal_bits(layer(x).detach(), torch.nn.functional.linear(x, values, layer.bias).detach())


def test_dequantized_weights_have_the_dtype_that_is_asked_for_and_stay_tied():
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    second.weight = first.weight
    model = converted(torch.nn.Sequential(first, second), "mxfp8")
    quire.dequantize_weights(model, torch.bfloat16)
    assert model[0].weight is model[1].weight and model[0].weight.dtype == torch.bfloat16


def test_every_layer_is_dequantized_with_its_static_scales():
    with quire.quantized_model_init(recipe="mxfp8"):
        trained = quire.Linear(64, 64)
    mixture = quire.MoE(64, 96, 4, 2, shared_ffn_hidden_size=32)
    static = quire.Linear(64, 64, recipe="x=fp8_tensor:given,w=fp8_row,dy=mxfp8")
    model = torch.nn.Sequential(trained, converted(mixture, "nvfp4"), converted(static, static.recipe))
    quire.dequantize_weights(model)
    assert not any(isinstance(p, quire.QuantizedTensor) for p in model.parameters())
    assert model[0].weight.requires_grad and "2.input_scale" not in model.state_dict()
    assert model(torch.randn(3, 64)).isfinite().all()


def test_a_model_of_plain_weights_is_refused():
    for model in (linear(), quire.convert(linear(), "mxfp8", min_features=1)):
        with pytest.raises(ValueError, match="has no quantized weights"):
            quire.dequantize_weights(model)
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16, got torch.int8"):
        quire.dequantize_weights(converted(linear(), "mxfp8"), torch.int8)
    with pytest.raises(TypeError, match="must be a torch.nn.Module"):
        quire.dequantize_weights(torch.ones(2))
