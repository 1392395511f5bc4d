"""Gradients of quire.Linear: their values, who gets one, what is kept for backward, and how often they can be taken."""

import contextlib
import itertools
import re
import weakref

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

import quire
from quire.recipe import NVFP4BlockScaling

pytestmark = pytest.mark.any_device

SIZES = [(8, 96, 64), (33, 50, 17), (1, 16, 16), (128, 256, 128)]


@pytest.fixture
def check_product(decode):
    """(result, operands, names and directions, bias) -> asserts the bound of float32 sums against float64."""

    def check(result, operands, sides, bias=None):
        a, b = (decode(operands[role], direction) for role, direction in sides)
        exact, size = a @ b.t(), a.abs() @ b.t().abs()
        if bias is not None:
            exact, size = exact + bias.double(), size + bias.double().abs()
        bound = (a.shape[1] + 6) * 2.0**-24 * size
        rounding = torch.finfo(result.dtype).eps / 2 * (exact.abs() + bound) + torch.finfo(result.dtype).smallest_normal
        assert (result.double() - exact).abs().le(bound + rounding).all()

    return check


@pytest.fixture
def do_step(make_layer, make_x, step):
    def run(m, k, n, dtype, recipe):
        layer = make_layer(k, n, dtype)
        return layer, step(layer, make_x(m, k, dtype=dtype), recipe)

    return run


@pytest.mark.parametrize("m, k, n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_quantized_operands(
    m, k, n, dtype, any_recipe, make_layer, make_x, step, check_product, device
):
    layer, x = make_layer(k, n, dtype), make_x(m, k, dtype=dtype)
    with quire.debug.operands() as records:
        done = step(layer, x, any_recipe)
    operands = {record.role: record.tensor for record in records}
    assert [record.role for record in records] == ["x", "w", "dy"]
    assert any_recipe.linear_spec() == ",".join(f"{role}={q.spec}" for role, q in operands.items())
    check_product(done.y, operands, [("x", "rowwise"), ("w", "rowwise")], layer.bias.detach().cpu())
    check_product(done.dx, operands, [("dy", "rowwise"), ("w", "columnwise")])
    check_product(done.dw, operands, [("dy", "columnwise"), ("x", "columnwise")])


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_gradient_sums_the_unquantized_gradient(dtype, make_layer, make_x, recipe, device):
    layer, x = make_layer(dtype=dtype), make_x(200, 96, dtype=dtype)
    dy = torch.randn(200, 64).to(dtype)
    with quire.autocast(recipe=recipe):
        layer(x).backward(dy.to(device))
    exact = dy.double().sum(0)
    bound = 206 * 2.0**-24 * dy.double().abs().sum(0) + torch.finfo(dtype).eps / 2 * exact.abs() * 1.01
    assert (layer.bias.grad.cpu().double() - exact).abs().le(bound).all()


@pytest.mark.parametrize("need", list(itertools.product([False, True], repeat=3)), ids=str)
def test_each_gradient_is_there_exactly_if_it_was_asked_for(need, make_layer, make_x, step, recipe, equal_bits, device):
    layer, x = make_layer(), make_x(16, 96)
    full = step(layer, x, recipe)
    layer = make_layer()
    for tensor, needed in zip((x, layer.weight, layer.bias), need, strict=True):
        tensor.requires_grad_(needed)
    if not any(need):
        with quire.autocast(recipe=recipe):
            assert not layer(x).requires_grad
        return
    done = step(layer, x, recipe)
    for got, expected, needed in zip((done.dx, done.dw, done.db), (full.dx, full.dw, full.db), need, strict=True):
        assert got is None if not needed else equal_bits(got, expected)


def test_a_layer_without_bias_has_the_other_gradients(make_layer, make_x, step, recipe):
    layer, x = make_layer(bias=False), make_x(16, 96)
    done = step(layer, x, recipe)
    assert done.db is None and done.dx.shape == (16, 96) and done.dw.shape == (64, 96)


class Packed:
    """Counts the bytes that autograd keeps, apart from the given tensors."""

    def __init__(self, *parameters):
        self.known = {p.untyped_storage().data_ptr() for p in parameters}
        self.seen = {}

    def __call__(self, tensor):
        self.seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    @property
    def bytes(self):
        return sum(n for pointer, n in self.seen.items() if pointer not in self.known)


FP8, FP4 = 0.53, 0.29  # of bfloat16
LIMITS = {"fp8_tensor": FP8, "fp8_block": FP8, "mxfp8": FP8, "mxfp4": FP4, "nvfp4": FP4}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_x_is_kept_quantized_and_only_so(compiled, make_layer, make_x, recipe, compiler):
    layer, x = make_layer(512, 256), make_x(256, 512, requires_grad=False)
    packed = Packed(layer.weight, layer.bias)
    function = compiler(layer) if compiled else layer
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t), quire.autocast(recipe=recipe):
        y = function(x)
    assert 0 < packed.bytes <= LIMITS[re.match("x=([a-z0-9_]+)", recipe.linear_spec())[1]] * x.nbytes
    gone = weakref.ref(x)
    del x
    assert gone() is None
    y.sum().backward()
    assert layer.weight.grad is not None


def test_nothing_is_kept_for_a_gradient_that_nobody_asked_for(make_layer, make_x, recipe):
    layer, x = make_layer(), make_x(16, 96)
    for tensor, kept in ((x, "w"), (layer.weight, "x")):
        x.requires_grad_(False), layer.requires_grad_(False), tensor.requires_grad_()
        packed = Packed()
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t), quire.autocast(recipe=recipe):
            layer(x)
        shape = {"w": (64, 96), "x": (16, 96)}[kept]
        spec = dict(part.split("=", 1) for part in recipe.linear_spec().split(","))[kept]
        stored = quire.TensorProto(shape, x.dtype, spec, rowwise=False, columnwise=True).create_tensor()
        assert packed.bytes == stored.nbytes


def test_a_graph_may_be_walked_twice_if_it_is_retained(make_layer, make_x, recipe, equal_bits, device):
    layer, x = make_layer(), make_x(16, 96)
    with quire.autocast(recipe=recipe):
        loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad, layer.sr_state[1] = None, 0
    loss.backward()
    assert equal_bits(x.grad, first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_derivative_is_refused_in_words(make_layer, make_x, recipe):
    layer, x = make_layer(), make_x(16, 96)
    with quire.autocast(recipe=recipe):
        y = layer(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match="quire::linear_backward .* quire::linear is once differentiable.*create_graph"
    ):
        dx.sum().backward()


def test_a_gradient_penalty_elsewhere_in_the_graph_works(make_layer, make_x, recipe):
    layer, x = make_layer(dtype=torch.float32), make_x(16, 96, dtype=torch.float32)
    v = torch.ones(3, requires_grad=True)
    with quire.autocast(recipe=recipe):
        y = layer(x).sum() + (v**3).sum()
    (dv,) = torch.autograd.grad(y, v, create_graph=True)
    dv.sum().backward()
    assert torch.equal(v.grad, torch.full((3,), 6.0))


def test_functional_transforms_in_reverse_mode_work(make_layer, make_x, recipe, equal_bits, device):
    layer, x = make_layer(dtype=torch.float32), make_x(16, 96, dtype=torch.float32)

    def loss(x, weight):
        with quire.autocast(recipe=recipe):
            return torch.func.functional_call(layer, {"weight": weight}, (x,)).square().sum()

    dx, dw = torch.func.grad(loss, argnums=(0, 1))(x.detach(), layer.weight.detach())
    layer.sr_state[1] = 0
    loss(x, layer.weight).backward()
    assert equal_bits(dx, x.grad) and equal_bits(dw, layer.weight.grad)


def test_vmap_runs_example_by_example(make_layer, make_x, recipe, equal_bits):
    layer, x = make_layer(), make_x(3, 16, 96, requires_grad=False)
    with torch.no_grad(), quire.autocast(recipe=recipe):
        assert equal_bits(torch.func.vmap(layer)(x), torch.stack([layer(one) for one in x]))


def test_forward_mode_is_refused_in_words(make_layer, make_x, recipe):
    layer, x = make_layer(), make_x(16, 96, requires_grad=False)
    for guard in (contextlib.nullcontext(), torch.no_grad()):
        with guard, quire.autocast(recipe=recipe), pytest.raises(RuntimeError, match="forward-mode.*use reverse mode"):
            torch.func.jvp(layer, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "enclosing"])
def test_recomputed_activations_are_the_same(reentrant, where, make_layer, make_x, step, recipe, device):
    layer, x = make_layer(), make_x(16, 96)
    inside = where == "inside"

    def block(x):
        with quire.autocast(recipe=recipe) if inside else contextlib.nullcontext():
            return layer(x) * 2

    def checkpointed(x):
        return checkpoint(block, x, use_reentrant=reentrant)

    expected = step(layer, x, recipe, lambda x: layer(x) * 2)
    assert step(layer, x, None if inside else recipe, checkpointed, enclose=True) == expected


@pytest.mark.parametrize("function", [checkpoint, quire.checkpoint])
def test_a_compiled_function_is_recomputed_under_the_recipe_or_refused_in_words(
    function, make_layer, make_x, step, recipe, device
):
    layer, x = make_layer(), make_x(16, 96)
    expected = step(layer, x, recipe)
    torch.compiler.reset()  # each recipe is a graph of the same code, of which there may be eight
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def call():
        return step(layer, x, recipe, lambda x: function(compiled, x, use_reentrant=False), enclose=True)

    if function is checkpoint and device.type != "cpu":
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"recipe of another thread.*use quire\.checkpoint"):
            call()
    else:
        assert call() == expected


def test_recomputing_outside_autocast_is_noticed(make_layer, make_x, step, recipe):
    layer, x = make_layer(), make_x(16, 96)
    with pytest.raises(CheckpointError, match="recomputes a forward pass that .* Use quire.checkpoint"):
        step(layer, x, recipe, lambda x: checkpoint(layer, x, use_reentrant=False))


def test_no_grad_and_inference_mode_give_the_same_bits(make_layer, make_x, recipe, equal_bits, device):
    layer, x = make_layer(), make_x(16, 96)
    with quire.autocast(recipe=recipe):
        y = layer(x)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                other = layer(x)
            assert equal_bits(y, other) and not other.requires_grad
    assert layer.sr_state[1] == 0


def test_an_unused_stochastic_state_does_not_matter_without_gradients(make_layer, make_x):
    layer, x = make_layer(), make_x(16, 96)
    with quire.autocast(recipe=NVFP4BlockScaling()), torch.inference_mode():
        inside = quire.Linear(96, 64, dtype=torch.bfloat16)
        assert inside(x).shape == layer(x).shape
