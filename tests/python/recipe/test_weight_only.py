"""Recipes that quantize weights only: x=none (numerics.md 6.12)."""

import copy

import pytest
import torch

import quire
from every_feature import LAYERS
from steps import assert_rounded, call, same

pytestmark = pytest.mark.any_device

K, N = 64, 32
W_SPECS = ["nvfp4", "mxfp4", "fp8_block:128x128", "fp8_row", "mxfp8", "nvfp4:row_scaled:global=div"]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def recipe(w: str) -> str:
    return f"x=none,w={w}"


def decoded(weight: torch.Tensor, w: str) -> torch.Tensor:
    return quire.quantize(weight.detach(), w).dequantize(weight.dtype)


@dtypes
@pytest.mark.parametrize("w", W_SPECS)
def test_products_are_those_of_x_itself_and_decoded_weights(w, dtype):
    torch.manual_seed(0)
    layer = quire.Linear(K, N, dtype=dtype, recipe=recipe(w))
    x, dy = torch.randn(5, 7, K).to(dtype).requires_grad_(), torch.randn(5, 7, N).to(dtype)
    y = layer(x)
    y.backward(dy)
    rows, grads, values = x.detach().reshape(-1, K), dy.reshape(-1, N), decoded(layer.weight, w)
    assert torch.equal(y.detach().reshape(-1, N), torch.addmm(layer.bias.detach(), rows, values.T))
    assert torch.equal(x.grad.reshape(-1, K), grads @ values)
    assert torch.equal(layer.weight.grad, grads.T @ rows)
    assert_rounded(layer.bias.grad, grads.double().sum(0), grads.double().abs().sum(0), len(grads))


def test_another_backward_uses_the_weight_itself():
    layer = quire.Linear(K, N, bias=False, recipe="x=none,w=mxfp4,dy=none,backward=high_precision")
    x, dy = torch.randn(6, K, requires_grad=True), torch.randn(6, N)
    y = layer(x)
    y.backward(dy)
    assert torch.equal(y.detach(), x.detach() @ decoded(layer.weight, "mxfp4").T)
    assert torch.equal(x.grad, dy @ layer.weight.detach())


def test_texts_and_names():
    short, long = quire.Linear(K, N, recipe="x=none,w=nvfp4"), quire.Linear(K, N, recipe="x=none,w=nvfp4,dy=none")
    assert short.recipe == long.recipe and short.recipe.weight_only
    assert short.recipe.linear_spec() == "x=none,w=nvfp4,dy=none,backward=dequantized"
    assert torch.ops.quire.canonical_recipe("x=none,w=nvfp4,dy=none") == short.recipe.linear_spec()
    assert short.recipe.linear_spec(fp8_grad=True) == short.recipe.linear_spec(save_original_input=True)
    custom = quire.recipe.CustomRecipe({"x": "none", "w": "nvfp4", "dy": "none"}.get)
    assert custom.linear_spec() == short.recipe.linear_spec()
    for wrong in ("x=none,w=none", "x=none,w=nvfp4,dy=mxfp8", "x=mxfp8,w=nvfp4,dy=none"):
        with pytest.raises(ValueError, match="recipe"):
            quire.Linear(K, N, recipe=wrong)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("converted", "MoE")])
def test_every_layer_computes_as_with_decoded_weights(name):
    torch.manual_seed(1)
    layer = LAYERS[name]()
    plain = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:
                each = [decoded(one, "fp8_row") for one in parameter.view(-1, *parameter.shape[-2:])]
                parameter.copy_(torch.stack(each).view(parameter.shape))
    x = torch.randn(24, 64)
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    with quire.autocast(
        recipe="x=none,w=fp8_row"
    ):  # in which rows of a part have the scale that they have in the whole
        y = call(layer, leaves[0])
    expected = call(plain, leaves[1])
    assert same(y, expected)
    y.sum().backward()
    expected.sum().backward()
    assert same(leaves[0].grad, leaves[1].grad)


def test_a_mixture_computes_as_with_decoded_experts():
    torch.manual_seed(2)
    layer = LAYERS["MoE"]()
    plain = copy.deepcopy(layer)
    with torch.no_grad():
        for part in (plain.fc1, plain.fc2, plain.shared_fc1, plain.shared_fc2):
            for parameter in part.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(decoded(parameter, "nvfp4"))
    x = torch.randn(24, 64)
    with quire.autocast(recipe="x=none,w=nvfp4"):
        y = layer(x)
    assert same(y, plain(x))


@pytest.mark.cpu_only
@pytest.mark.parametrize("grad", [False, True])
def test_graphs_give_the_same_bits(grad):
    layer = quire.Linear(K, N, recipe="x=none,w=nvfp4", dtype=torch.bfloat16)
    x = torch.randn(9, K, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)

    def run(function):
        layer.zero_grad()
        leaf = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            y = function(leaf)
        if grad:
            y.float().sum().backward()
        return [y.detach(), *([leaf.grad, layer.weight.grad] if grad else [])]

    assert all(map(torch.equal, run(compiled), run(layer)))
    if not grad:
        with torch.no_grad():
            assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_quantized_parameters_stay_as_they_are():
    with quire.quantized_model_init(recipe="x=none,w=nvfp4:global=mul"):
        layer = quire.Linear(K, N, recipe="x=none,w=nvfp4:global=mul")
    x = torch.randn(4, K, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    values = layer.weight.dequantize()
    assert torch.equal(y.detach(), torch.addmm(layer.bias.detach(), x.detach(), values.T))
    assert torch.equal(x.grad, torch.ones(4, N) @ values)
    model = torch.nn.Sequential(torch.nn.Linear(K, N))
    values = decoded(model[0].weight, "mxfp4")
    served = quire.convert(model, "x=none,w=mxfp4", for_inference=True, tokens=None, min_features=1)
    with torch.no_grad():
        assert torch.equal(served(x), torch.addmm(model[0].bias, x, values.T))
    assert "matmul" in str(quire.explain(served, x))


def test_a_quantized_x_is_decoded_and_quantized_results_are_refused():
    layer = quire.Linear(K, N, bias=False, recipe="x=none,w=nvfp4")
    x = quire.quantize(torch.randn(4, K), "mxfp8")
    with torch.no_grad():
        assert torch.equal(layer(x), x.dequantize() @ decoded(layer.weight, "nvfp4").T)
    with pytest.raises(ValueError, match="quantizes the result as x, and x is none"):
        layer(torch.randn(4, K), fp8_output=True)
    with pytest.raises(RuntimeError, match="multiplies x itself"):
        torch.ops.quire.linear_prequantized(
            x.carrier(), layer.weight.detach(), None, layer.recipe.linear_spec(), torch.float32, x.buffer_list(), []
        )


def test_kept_codes_and_gradients_elsewhere():
    torch.manual_seed(3)
    kept = quire.Linear(K, N, bias=False, fuse_wgrad_accumulation=True, recipe="x=none,w=nvfp4")
    kept.weight.main_grad = torch.zeros(N, K)
    x, total = torch.randn(8, K), torch.zeros(N, K)
    for first in (True, False):
        y = kept(x, is_first_microbatch=first)
        assert torch.equal(y.detach(), x @ decoded(kept.weight, "nvfp4").T)
        y.sum().backward()
        total += torch.ones(8, N).T @ x
    torch.testing.assert_close(kept.weight.main_grad, total)
    later = quire.Linear(K, N, bias=False, delay_wgrad_compute=True, recipe="x=none,w=nvfp4")
    later(x).sum().backward()
    assert later.weight.grad is None
    later.backward_dw()
    torch.testing.assert_close(later.weight.grad, torch.ones(8, N).T @ x)
