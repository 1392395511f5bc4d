"""Layers within PyTorch's operators of control flow, in graphs."""

import pytest
import torch
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan

import pytorch
import quire
from every_recipe import each, some

pytestmark = pytest.mark.any_device


def thrice(layer, x):
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, layer(x)), (torch.zeros((), dtype=torch.int64), x))[1]


def summed(layer, x):
    return scan(lambda carry, a: (layer(carry) + a, carry.clone()), x, torch.ones(3, 4, 32))[0]


def summed_in_python(layer, x):
    for _ in range(3):
        x = layer(x) + 1
    return x


#: Operator -> a function of a layer and x [4, 32] that calls it, and the same in Python.
OPERATORS = {
    "cond": (lambda f, x: torch.cond(x.sum() > -1e9, lambda x: f(x), lambda x: x.clone(), (x,)), lambda f, x: f(x)),
    "while_loop": (thrice, lambda f, x: f(f(f(x)))),
    "scan": (summed, summed_in_python),
    "map": (lambda f, x: map_(lambda a: f(a), x.reshape(2, 2, 32)), lambda f, x: torch.stack([f(x[:2]), f(x[2:])])),
}
operators = pytest.mark.parametrize(("graph", "python"), OPERATORS.values(), ids=OPERATORS)


def gradients(function, recipe):
    torch.manual_seed(0)
    layer, x = quire.Linear(32, 32, recipe=recipe), torch.randn(4, 32, requires_grad=True)
    y = function(layer, x)
    y.sum().backward()
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


#: With a torch.nn.Linear too.
ALIASES = {"scan": pytorch.fails_before("2.13", "the backward pass of scan might be aliasing the input or the output")}


@pytest.mark.parametrize(
    ("graph", "python"),
    [pytest.param(*pair, marks=ALIASES.get(name, ()), id=name) for name, pair in OPERATORS.items()],
)
@each(some("fp8_current", "fp8_block", "mxfp4", "mxfp8", "nvfp4_no_sr"))
def test_layers_in_control_flow_give_the_bits_of_python(graph, python, recipe):
    torch.compiler.reset()
    compiled = torch.compile(graph, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled, recipe), gradients(python, recipe), strict=True))


@operators
def test_stochastic_rounding_in_control_flow_needs_a_graph_without_gradients(graph, python):
    """docs/troubleshooting.md says so. Should PyTorch learn it, compare with Python above, and delete it there."""
    torch.compiler.reset()
    compiled = torch.compile(graph, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="advances the layer's random state.*disable_stochastic_rounding=True"):
        gradients(compiled, quire.recipe.NVFP4BlockScaling())
    layer, x = quire.Linear(32, 32, recipe="nvfp4"), torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(compiled(layer, x), python(layer, x))


#: What PyTorch takes since 2.14.
TAKEN = pytest.mark.skipif(not pytorch.is_before("2.14"), reason="PyTorch takes it since 2.14")


@pytest.mark.parametrize(
    ("name", "with_gradients"),
    [
        pytest.param(name, grad, marks=TAKEN if (name, grad) == ("cond", False) else ())
        for name in OPERATORS
        for grad in (True, False)
    ],
)
def test_delayed_scaling_in_control_flow_needs_python(name, with_gradients):
    graph, python = OPERATORS[name]
    layer, x = quire.Linear(32, 32), torch.randn(4, 32)
    with torch.set_grad_enabled(with_gradients), quire.autocast(recipe="fp8_delayed"):
        assert python(layer, x).isfinite().all()
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            torch.compile(graph, backend="aot_eager", fullgraph=True)(layer, x)
