"""Quantized inputs and outputs of quire.Linear."""

import copy

import pytest
import torch

import pytorch
import quire
from every_recipe import ALL, DELAYED, each, every_recipe, some, ways
from steps import same

pytestmark = pytest.mark.any_device


@every_recipe
@pytest.mark.parametrize("grad", [False, True])
def test_a_quantized_input_gives_the_bits_of_a_plain_one(recipe, grad, make_layer, make_x, device):
    original, x = make_layer(), make_x(33, 96, requires_grad=grad)
    scale = torch.ones(1, device=device) if recipe.delayed() else None
    results = []
    for quantized in (False, True):
        layer = copy.deepcopy(original)
        leaf = x.detach().requires_grad_(grad)
        q = quire.quantize(leaf, recipe.input_spec, columnwise=True, scale=scale) if quantized else leaf
        if quantized:
            assert isinstance(q, quire.QuantizedActivation if grad else quire.QuantizedTensor)
        with quire.autocast(recipe=recipe):
            y = layer(q)
        y.sum().backward()
        results.append([y.detach(), leaf.grad, layer.weight.grad])
    assert same(*results)


@ways
def test_delayed_scaling_of_a_quantized_input_moves_the_other_slots(compiled, compiler, make_layer, make_x):
    layer, x = make_layer(), make_x(33, 96)
    function = compiler(layer) if compiled else layer
    for _ in range(2):
        q = quire.quantize(x, "fp8_tensor", columnwise=True)
        with quire.autocast(recipe=DELAYED):
            function(q).sum().backward()
    w = layer.weight.detach().float().abs().max()
    assert torch.equal(layer.delayed.fwd_scale, torch.stack([torch.ones(()), 448 / w, torch.ones(())]))
    assert layer.delayed.bwd_scale[0] != 1


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8"])
def test_a_missing_direction_of_a_quantized_input_is_made(name, make_layer, make_x, equal_bits, device):
    layer, x, recipe = make_layer(), make_x(33, 96), ALL[name]
    with quire.autocast(recipe=recipe):
        layer(quire.quantize(x, recipe.input_spec)).sum().backward()
        dw, decoded = layer.weight.grad, quire.quantize(x.detach(), recipe.input_spec).dequantize()
        layer.zero_grad()
        layer(x if name == "fp8_current" else decoded).sum().backward()  # exact, or of the decoded values
    assert equal_bits(dw, layer.weight.grad)


@each(some("fp8_current", "mxfp8"))
@pytest.mark.parametrize("grad", [False, True])
def test_a_missing_direction_of_a_quantized_input_does_not_break_a_graph(grad, recipe, compiler, make_layer, make_x):
    layer, x = make_layer(), make_x(33, 96, requires_grad=grad)

    def gradients(function):
        layer.zero_grad()
        with quire.autocast(recipe=recipe):
            function(quire.quantize(x, "fp8_tensor")).sum().backward()
        return layer.weight.grad

    assert torch.equal(gradients(compiler(lambda q: layer(q))), gradients(layer)) and compiler.graphs == 1


@every_recipe
@ways
def test_layers_chain_without_decoding(recipe, compiled, compiler, make_x, device):
    torch.manual_seed(2)
    first = torch.nn.ModuleList([quire.Linear(96, 96, params_dtype=torch.bfloat16) for _ in range(2)]).to(device)
    x = make_x(33, 96)

    def chain(layers, x):
        return layers[1](layers[0](x, fp8_output=True))

    def steps(layers, x):
        y = layers[0](x)
        scale = layers[0].delayed.fwd_scale[2:3] if recipe.delayed() else None
        return layers[1](quire.quantize(y, recipe.input_spec, columnwise=True, scale=scale))

    results = []
    for function in (compiler(chain) if compiled else chain, steps):
        layers, leaf = copy.deepcopy(first), x.detach().requires_grad_()
        for layer in layers:  # the scales of x, w and y differ
            layer.delayed.fwd_scale = torch.tensor([2.0, 4.0, 8.0], device=device)
        with quire.autocast(recipe=recipe):
            y = function(layers, leaf)
        y.sum().backward()
        results.append([y.detach(), leaf.grad, *(layer.weight.grad for layer in layers)])
        if recipe.delayed() and function is not steps:
            assert layers[0].delayed.fwd_amax[2] > 0
    assert same(*results)


@pytorch.takes_gradients_of_expanded_results
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_quantized_activation_crosses_borders_of_graphs(name, backend, compiler, make_layer, make_x):
    first, second, recipe = make_layer(96, 96), make_layer(96, 64), ALL[name]
    make = compiler(lambda x: first(x, fp8_output=True), backend=backend)
    use = compiler(lambda q: second(q), backend=backend)
    results = []
    for producer, consumer in ((lambda x: first(x, fp8_output=True), second), (make, use), (make, second)):
        for layer in (first, second):
            layer.zero_grad()
            layer.sr_state[1] = 0
        x = make_x(33, 96)
        with quire.autocast(recipe=recipe):
            q = producer(x)
            assert isinstance(q, quire.QuantizedActivation) and q.requires_grad
            y = consumer(q)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, first.weight.grad, second.weight.grad])
    assert same(results[1], results[0])
    assert same(results[2], results[0])


@ways
def test_an_output_spec_gives_a_quantized_tensor_where_nothing_wants_a_gradient(compiled, compiler, make_layer, make_x):
    layer, x = make_layer(), make_x(5, 96)
    function = (
        compiler(lambda t: layer(t, output_spec="fp8_row")) if compiled else lambda t: layer(t, output_spec="fp8_row")
    )
    with torch.no_grad(), quire.autocast():
        q = function(x)
        expected = quire.quantize(layer(x), "fp8_row")
    assert type(q) is quire.QuantizedTensor and q.spec == quire.QuantSpec("fp8_row")
    assert torch.equal(q.rowwise_data, expected.rowwise_data) and torch.equal(q.dequantize(), expected.dequantize())


@pytorch.takes_gradients_of_expanded_results
@ways
def test_a_quantized_output_with_only_a_bias_gradient(compiled, compiler, make_layer, make_x):
    layer, x = make_layer(), make_x(5, 96, requires_grad=False)
    layer.weight.requires_grad_(False)
    function = compiler(lambda t: layer(t, fp8_output=True)) if compiled else lambda t: layer(t, fp8_output=True)
    with quire.autocast():
        y = function(x)
    y.dequantize().float().sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((64,), 5.0).bfloat16())


def test_a_quantized_activation_decodes_with_a_gradient_and_is_a_pytree(make_x, device):
    x = make_x(33, 64)
    q = quire.quantize(x, "mxfp8")
    torch.autograd.backward(q.dequantize(), 3 * torch.ones(33, 64, device=device).bfloat16())
    assert torch.equal(x.grad.cpu(), 3 * torch.ones(33, 64).bfloat16())
    assert torch.equal(q.dequantize(), quire.quantize(x.detach(), "mxfp8").dequantize())
    leaves, spec = torch.utils._pytree.tree_flatten(q)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert again.spec == q.spec and again.shape == q.shape and again.carrier is q.carrier
    assert "mxfp8" in repr(q) and q.carrier.untyped_storage().nbytes() == 2


@every_recipe
@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantized_tensor_that_wants_a_gradient_gets_that_of_its_values(
    recipe, compiled, compiler, make_layer, make_x, device
):
    original, x = make_layer(), make_x(33, 96, requires_grad=False)
    scale = torch.ones(1, device=device) if recipe.delayed() else None
    leaves = [x.clone(), quire.quantize(x, recipe.input_spec, columnwise=True, scale=scale)]
    results = []
    for leaf in leaves:
        layer = copy.deepcopy(original)
        function = compiler(layer, backend="aot_eager") if compiled else layer
        with quire.autocast(recipe=recipe):
            y = function(leaf.requires_grad_())
        y.sum().backward()
        assert type(leaf.grad) is torch.Tensor and leaf.grad.dtype == x.dtype
        results.append([y.detach(), leaf.grad, layer.weight.grad])
    assert same(*results)
    with torch.no_grad(), quire.autocast(recipe=recipe):
        assert not layer(leaves[1]).requires_grad


def test_a_quantized_input_of_another_spec_is_multiplied_under_its_own(device):
    torch.manual_seed(0)
    layer, x = quire.Linear(64, 32).to(device), torch.randn(40, 64).to(device)
    own = quire.recipe.CustomRecipe({"x": "fp8_row", "w": "mxfp8", "dy": "mxfp8"}.get)
    results = []
    for recipe, given in ((own, x), (ALL["mxfp8"], quire.quantize(x, "fp8_row", columnwise=True))):
        layer.zero_grad()
        with quire.autocast(recipe=recipe):
            y = layer(given)
        y.square().sum().backward()
        results.append([y, layer.weight.grad])
    assert same(*results)
