"""Operators are once differentiable. A second derivative raises, also where the gradient that arrives is constant."""

import pytest
import torch

import quire
from pytorch import fails_before

ops = torch.ops.quire
RECIPE = "x=mxfp8,w=mxfp8,dy=mxfp8"
ROW_MAP = torch.tensor([[0, 3], [2, 1], [4, -1]], dtype=torch.int32)


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def grouped(recipe):
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    return lambda x, w0, w1: ops.grouped_linear(x, [w0, w1], [], offsets, recipe, x.dtype, [], [], [])[0]


# Outer operator -> the call, and the tensors that it is differentiable in.
CASES = {
    "linear": (lambda x, w, b: ops.linear(x, w, b, RECIPE, x.dtype), (leaf(5, 32), leaf(48, 32), leaf(48))),
    "linear_prequantized": (
        lambda x, w: ops.linear_prequantized(x, w, None, RECIPE, x.dtype, [], []),
        (leaf(5, 32), leaf(48, 32)),
    ),
    "linear in high precision": (
        lambda x, w: ops.linear(x, w, None, RECIPE + ",backward=high_precision", x.dtype),
        (leaf(5, 32), leaf(48, 32)),
    ),
    "grouped_linear": (grouped(RECIPE), (leaf(5, 32), leaf(48, 32), leaf(48, 32))),
    "grouped_linear in high precision": (grouped(""), (leaf(5, 32), leaf(48, 32), leaf(48, 32))),
    "norm": (
        lambda x, weight, bias: ops.norm(x, weight, bias, "LayerNorm", 1e-5, False, x.dtype)[0],
        (leaf(5, 32), leaf(32), leaf(32)),
    ),
    "activation": (lambda x: ops.activation(x, "swiglu", x.dtype)[0], (leaf(5, 32),)),
    "route": (lambda logits: ops.route(logits, None, "softmax:topk=2")[0], (leaf(5, 8),)),
    "permute": (lambda x, weights: ops.permute(x, ROW_MAP, weights, 5), (leaf(3, 32), leaf(3, 2))),
    "permute without weights": (lambda x: ops.permute(x, ROW_MAP, None, 5), (leaf(3, 32),)),
    "unpermute": (lambda y, weights: ops.unpermute(y, ROW_MAP, weights), (leaf(5, 32), leaf(3, 2))),
}


def gradients(name, weigh):
    function, inputs = CASES[name]
    y = function(*inputs)
    return inputs, torch.autograd.grad(weigh(y), inputs, create_graph=True)


@pytest.mark.parametrize("weigh", [torch.sum, lambda y: y.square().sum()], ids=["constant", "depending"])
@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_not_lost_without_a_word(name, weigh):
    inputs, computed = gradients(name, weigh)
    for gradient in computed:
        assert gradient.requires_grad
        for respect in inputs:
            with pytest.raises(RuntimeError, match=f"quire::{name.split()[0]} is once differentiable.*create_graph"):
                torch.autograd.grad(gradient.sum(), respect, retain_graph=True)


@pytest.mark.parametrize("name", CASES)
def test_a_graph_of_gradients_does_not_change_them(name):
    function, inputs = CASES[name]
    _, computed = gradients(name, lambda y: y.square().sum())
    expected = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(computed, expected, strict=True))
    assert not any(gradient.requires_grad for gradient in expected)


def test_the_gradient_that_arrived_keeps_its_own_history():
    x, factor = leaf(4, 32), torch.full((4, 32), 2.0, requires_grad=True)
    y = ops.quantize_through(x, "mxfp8", True, True)[0]
    (dx,) = torch.autograd.grad((y * factor).sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(dx.sum(), factor)[0], torch.ones(4, 32))


@fails_before(
    "2.13", "a compiled backward pass refuses to be differentiated only if it saved a tensor that needs a gradient"
)
@pytest.mark.parametrize("layer", [quire.Linear, quire.LayerNormLinear])
def test_a_compiled_second_derivative_is_not_lost_without_a_word(layer):
    torch._dynamo.reset()
    layer, x = layer(32, 32), leaf(5, 32)
    recipe = quire.recipe.MXFP8BlockScaling()
    with torch._functorch.config.patch(donated_buffer=False), quire.autocast(recipe=recipe):
        y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    with pytest.raises(RuntimeError, match="double backward|create_graph=True"):
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        dx.sum().backward()
