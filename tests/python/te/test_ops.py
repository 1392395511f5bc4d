"""te.ops: operations and chains of them against computations in float64, and against quire's layers; and further names
of TransformerEngine's that are composed of PyTorch's."""

import copy
import functools
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

import quire
import quire.te.pytorch as te
from quire.te import quantizer_factories
from quire.te.common import recipe as recipes
from quire.te.pytorch import ops
from steps import assert_rounded

RECIPES = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def within(recipe):
    return nullcontext() if recipe is None else te.autocast(recipe=recipe)


def tanh_gelu(x):
    # PyTorch's tanh form adds 1 to a tanh, which cancels digits of float64.
    return x * torch.sigmoid((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x):
    return torch.relu(x) ** 2


silu = torch.nn.functional.silu


def by_turns(x, size):
    """Columns in blocks by turns -> the gate's and then the others'."""
    gate = [i for i in range(x.shape[-1]) if i // size % 2 == 0]
    return x[..., gate + [i for i in range(x.shape[-1]) if i // size % 2]]


def same_values(b):
    return b


@dataclass(frozen=True)
class Curve:
    """y = gate(a) * linear(b) of two halves of the columns; without linear, y = gate(x).

    size: columns of both come by turns, in blocks of this many. slope(a): at least the sum of the magnitudes of the
    terms of gate'(a). extra: how many roundings there are beside those of numerics.md 11.3."""

    gate: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor], torch.Tensor] | None = None
    size: int | None = None
    #: Both terms of a curve's derivative are below 1.2, but that of SReLU is 2 a.
    slope: Callable[[torch.Tensor], torch.Tensor] = lambda a: 2.4 + 2 * a.abs()
    extra: int = 0

    def halves(self, x):
        x = x if self.size is None else by_turns(x, self.size)
        return [x] if self.linear is None else x.chunk(2, -1)

    def roundings(self, a):
        """Of y relative to y; 1.8 a + 0.08 a^3 is at least the argument of any sigmoid here."""
        return 8 + 4 * a.abs() * (1.8 + 0.08 * a.square()) + self.extra


def gated(curve, size=None):
    return Curve(curve, same_values, size)


def clamped():
    # All three numbers are exact in float32.
    def gate(a):
        a = a.clamp(max=1.5)
        return a * torch.sigmoid(1.25 * a)

    return Curve(gate, lambda b: b.clamp(-1.5, 1.5) + 0.5)


def soft_capped(size=None):
    """PyTorch's functions: two tanh with 4 roundings each, two divisions and five products. With t the tanh and s the
    sigmoid, gate' has the terms (1 + t^2) s and 2 t s (1 + s), of which the first is below 2 and the second below 4."""
    gate = lambda a: 2 * torch.tanh(a / 2) * torch.sigmoid(a)  # noqa: E731
    return Curve(gate, lambda b: 3 * torch.tanh(b / 3), size, lambda a: torch.full_like(a, 6.0), 15)


CLAMPED = {"limit": 1.5, "alpha": 1.25, "glu_linear_offset": 0.5}
#: Operation, which may take an extra input of a scale for each row -> the curve in float64.
CURVES = [
    (ops.GELU(), Curve(tanh_gelu)),
    (ops.GEGLU(), gated(tanh_gelu)),
    (ops.GLU(), gated(torch.sigmoid)),
    (ops.QGELU(), Curve(quick_gelu)),
    (ops.QGEGLU(), gated(quick_gelu)),
    (ops.ReLU(), Curve(torch.relu)),
    (ops.ReGLU(), gated(torch.relu)),
    (ops.SReLU(), Curve(squared_relu)),
    (ops.SReGLU(), gated(squared_relu)),
    (ops.SiLU(), Curve(silu)),
    (ops.SwiGLU(), gated(silu)),
    (ops.SwiGLU(glu_interleave_size=4), gated(silu, 4)),
    (ops.ClampedSwiGLU(**CLAMPED), clamped()),
    (ops.SiTUGLU(beta1=2, beta2=3), soft_capped()),
    (ops.SiTUGLU(beta1=2, beta2=3, glu_interleave_size=2), soft_capped(2)),
    (ops.ScaledSReLU(), Curve(squared_relu)),
    (ops.ScaledSwiGLU(8), gated(silu, 8)),
    (ops.ScaledClampedQGeGLU(**CLAMPED), clamped()),
    (ops.ScaledSiTUGLU(beta1=2, beta2=3), soft_capped()),
]


@pytest.mark.parametrize(("operation", "curve"), CURVES, ids=lambda value: type(value).__name__)
def test_an_activation_and_its_gradients_are_those_of_float64(operation, curve):
    torch.manual_seed(0)
    given = [torch.randn(6, 16, requires_grad=True), *[torch.randn(6, requires_grad=True)] * operation.num_extra_inputs]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    halves = curve.halves(wide[0])
    a, linear = halves[0], torch.ones(()).double() if curve.linear is None else curve.linear(halves[1])
    scales = wide[1][:, None] if operation.num_extra_inputs else torch.ones(()).double()
    expected = curve.gate(a) * linear * scales
    dy = torch.randn(expected.shape)
    exact = torch.autograd.grad(expected, wide, dy.double(), retain_graph=True)
    y = ops.Sequential(operation)(*given)
    found = torch.autograd.grad(y, given, dy)
    with torch.no_grad():
        roundings, of_dy = curve.roundings(a), dy.double().abs() * scales.abs()
        # The term of a soft cap's derivative is 1 + t^2, that of other linear parts 1.
        of_halves = [of_dy * linear.abs() * curve.slope(a), of_dy * curve.gate(a).abs() * 2][: len(halves)]
        of_scales = (dy.double() * expected / scales).abs()
    assert_rounded(y, expected, (roundings + 1) * expected.detach().abs(), 1)
    # Halves are columns of x, each once.
    (of_x,) = torch.autograd.grad(halves, wide[:1], [2 * (roundings + 1) * size for size in of_halves])
    assert_rounded(found[0], exact[0], of_x, 1)
    if operation.num_extra_inputs:
        assert_rounded(found[1], exact[1], ((roundings + len(dy[0]) + 1) * of_scales).sum(1), 1)


#: Operation -> the function in float64, and how many roundings it has.
FACTORS = [
    (ops.ConstantScale(0.3), lambda x: 0.3 * x, 2),
    (ops.Dropout(0.5).eval(), lambda x: x, 0),
    (ops.Identity(), lambda x: x, 0),
    (ops.Reshape((2, -1)), lambda x: x.reshape(2, -1), 0),
]


@pytest.mark.parametrize(("operation", "function", "roundings"), FACTORS, ids=lambda value: type(value).__name__)
def test_an_operation_that_multiplies_or_moves_values_is_that_of_float64(operation, function, roundings):
    x = torch.randn(6, 16, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    y, expected = ops.Sequential(operation)(x), function(wide)
    dy = torch.randn(expected.shape)
    (found,), (exact,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, wide, dy.double())
    assert_rounded(y, expected, expected.abs(), roundings)
    assert_rounded(found, exact, exact.abs(), roundings)


def test_l2_normalization_and_its_gradient_are_those_of_float64():
    x = torch.randn(6, 16, requires_grad=True)
    wide, dy = x.detach().double().requires_grad_(), torch.randn(6, 16)
    y, root = ops.L2Normalization(eps=0.1)(x), (wide.square().sum(-1, keepdim=True) + 0.1).rsqrt()
    expected = wide * root
    (found,), (exact,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, wide, dy.double())
    # The sum of 16 squares and eps, each rounded, has 18 roundings, its root half of them and 2 of its own.
    of_root, dy, wide, root = 11, dy.double().abs(), wide.detach().abs(), root.detach()
    assert_rounded(y, expected, expected.abs(), of_root + 1)
    # dy r - x r^3 sum(dy x): three factors r, a sum of 16 products, and six products and a sum around them.
    magnitude = dy * root + wide * root**3 * (dy * wide).sum(-1, keepdim=True)
    assert_rounded(found, exact, magnitude, 3 * of_root + 16 + 7)


def chain():
    torch.manual_seed(1)
    made = ops.Sequential(
        ops.LayerNorm(32, zero_centered_gamma=True),
        ops.Linear(32, 48),
        ops.SwiGLU(),
        ops.BasicLinear(24, 32),
        ops.Bias(32),
        ops.MakeExtraOutput(),
        torch.nn.ReLU(),
        ops.RMSNorm(32),
        ops.AddExtraInput(),
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


class Parts(torch.nn.Module):
    """The same of quire's layers and functions, each of which is compared with float64 by a test of its own."""

    def __init__(self, made):
        super().__init__()
        self.first = quire.LayerNorm(32, zero_centered_gamma=True)
        self.up, self.down = quire.Linear(32, 48), quire.Linear(24, 32, return_bias=True)
        self.last = quire.RMSNorm(32)
        for own, parameter in zip(self.parameters(), made.parameters(), strict=True):
            own.data.copy_(parameter.data)

    def forward(self, x, extra):
        y = quire.functional.activation(self.up(self.first(x)), "swiglu", torch.float32)[0]
        y = torch.add(*self.down(y))  # no bias in the product, as in the chain
        return self.last(torch.relu(y)) + extra, y


def test_a_chain_gives_the_bits_of_its_parts():
    made = chain()
    parts = Parts(made)
    x, extra = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 5, 32, requires_grad=True)
    found, wanted = made(x, extra), parts(x, extra)
    dy = [torch.randn_like(y) for y in found]
    assert all(map(torch.equal, found, wanted))
    gradients = torch.autograd.grad(wanted, [x, extra, *parts.parameters()], dy)
    assert all(map(torch.equal, torch.autograd.grad(found, [x, extra, *made.parameters()], dy), gradients))


@pytest.mark.parametrize("name", RECIPES)
def test_a_chain_computes_what_its_layers_do_under_each_recipe_and_in_a_graph(name):
    recipe, made = RECIPES[name], chain()[1:5]
    first, second = quire.Linear(32, 48), quire.Linear(24, 32)
    first.load_state_dict(made[0].state_dict())
    second.load_state_dict({"weight": made[2].weight, "bias": made[3].bias})
    x = torch.randn(32, 32, requires_grad=True)
    dy = torch.randn(32, 32)

    def run(function):
        with within(recipe):
            y = function(x)
        return y, *torch.autograd.grad(y, [x], dy)

    # No bias in the product, as in the chain.
    second.return_bias = True
    expected = run(lambda x: second(ops.SwiGLU()(first(x)))[0] + second.bias)
    found = run(made)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    if recipe is None or not recipe.delayed():  # a second step has other scales
        assert all(torch.equal(one, other) for one, other in zip(run(compiled), expected, strict=True))


def test_operations_take_x_in_the_dtype_of_their_weights_or_of_torch_autocast():
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    for operation in (ops.LayerNorm(32), ops.RMSNorm(32), ops.Linear(32, 16), ops.BasicLinear(32, 16)):
        assert operation(x).dtype == torch.float32
        assert torch.equal(operation(x), operation(x.float()))
        with torch.autocast("cpu", torch.bfloat16):
            assert operation(x).dtype == operation(x.float()).dtype == torch.bfloat16


def test_groups_of_rows_are_an_extra_input():
    grouped = ops.GroupedLinear(2, 32, 16)
    x, sizes, scales = torch.randn(7, 32), torch.tensor([3, 4]), torch.rand(7)
    y = ops.Sequential(grouped, ops.ScaledSwiGLU())(x, sizes, scales)
    z = torch.cat([x[:3] @ grouped.weight0.T + grouped.bias0, x[3:] @ grouped.weight1.T + grouped.bias1])
    gate, linear = z.chunk(2, -1)
    torch.testing.assert_close(y, silu(gate) * linear * scales[:, None])


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("none", "delayed")])
def test_quantize_gives_the_codes_that_a_layer_would_use(name):
    recipe = RECIPES[name]
    layer = ops.BasicLinear(32, 32)
    x = torch.randn(32, 32, requires_grad=True)
    dy = torch.randn(32, 32)
    with te.autocast(recipe=recipe):
        q = ops.Quantize()(x)
        y, alone = ops.Sequential(ops.Quantize(), layer)(x), layer(x)
        values = ops.Sequential(ops.Quantize(), ops.ConstantScale(2))(x)
        rounded = ops.Quantize(forward=False, backward=True)(x)
        with torch.no_grad():
            assert isinstance(ops.Quantize()(x), quire.QuantizedTensor)
    spec = recipe.frozen().input_spec
    expected = quire.quantize(x.detach(), spec)
    assert q.spec_text == spec and torch.equal(q.detach().rowwise_data, expected.rowwise_data)
    assert torch.equal(y, alone) and torch.equal(values, 2 * expected.dequantize())
    for one, other in zip(
        torch.autograd.grad(y, [x, layer.weight], dy), torch.autograd.grad(alone, [x, layer.weight], dy), strict=True
    ):
        assert torch.equal(one, other)
    gradient_spec = recipe.frozen().linear_spec(fp8_grad=True).rpartition("=")[2]
    assert torch.equal(rounded, x)
    assert torch.equal(torch.autograd.grad(rounded, x, dy)[0], quire.quantize(dy, gradient_spec).dequantize())
    assert ops.Quantize()(x) is x


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_quantize_has_scales_of_its_own_under_delayed_scaling(compiled, compiler):
    recipe = recipes.DelayedScaling(amax_history_len=3, amax_compute_algo="max", fp8_format=recipes.Format.HYBRID)
    made = ops.Sequential(ops.Quantize(backward=not compiled), ops.Identity())
    function, maxima = compiler(made) if compiled else made, {448.0: [], 57344.0: []}
    for step in range(6):
        x = (torch.randn(8, 32) * 3.0 ** (step % 4)).requires_grad_()
        dy = torch.randn(8, 32) / 5.0**step
        scales = [limit / max(seen[-3:]) if seen else 1.0 for limit, seen in maxima.items()]
        with te.autocast(recipe=recipe):
            y = function(x)
        wanted = quire.quantize(x.detach(), "fp8_tensor", scale=torch.tensor([scales[0]]))
        assert torch.equal(y.detach().rowwise_data, wanted.rowwise_data)
        if not compiled:
            y.backward(dy)
            rounded = (dy.double() * scales[1]).to(torch.float8_e5m2).double() / scales[1]
            # The multiplier is rounded to float32, its inverse again, and the value of a code: no code is at a middle.
            torch.testing.assert_close(x.grad.double(), rounded, rtol=3 * 2.0**-24, atol=0)
        for seen, values in zip(maxima.values(), (x, dy), strict=True):
            seen.append(values.abs().max().item())
    state = quire.delayed_state(made)
    assert list(state) == ["0.delayed"]
    other = ops.Sequential(ops.Quantize(), ops.Identity())
    quire.set_delayed_state(other, state)
    for copied in (other, copy.deepcopy(made)):
        assert torch.equal(quire.delayed_state(copied)["0.delayed"]["scale_fwd"], state["0.delayed"]["scale_fwd"])
    assert made.to("meta")[0].delayed.usage.is_meta


def test_quantize_rounds_no_gradient_that_is_quantized():
    x = torch.randn(8, 32, requires_grad=True)
    with te.autocast(recipe=RECIPES["current"]):
        y = ops.Quantize(forward=False, backward=True)(x)
    dy = quire.quantize(torch.randn(8, 32), "mxfp8")
    y.backward(dy)
    assert torch.equal(x.grad, dy.dequantize())


def test_what_an_operation_cannot_do_it_says(compiler):
    with te.autocast(recipe=RECIPES["delayed"]), pytest.raises(Exception, match="Quantize: backward=True is not avail"):
        compiler(ops.Quantize(backward=True))(torch.ones(4, 32))

    x = torch.randn(4, 32)
    static = quire.recipe.CustomRecipe({"x": "fp8_tensor:given", "w": "fp8_tensor", "dy": "fp8_tensor"}.get)
    with te.autocast(recipe=static), pytest.raises(NotImplementedError, match="Quantize: CustomRecipe"):
        ops.Quantize()(x)
    for make, error, words in (
        (lambda: ops.BasicLinear(8, 8, bias=True), TypeError, "BasicLinear: there is no bias"),
        (lambda: ops.BasicLinear(8, 8, userbuffers_options={}), NotImplementedError, "userbuffers_options"),
        (lambda: ops.Bias(8, tensor_parallel=True), NotImplementedError, "Bias: tensor_parallel=True"),
        (lambda: ops.SiTUGLU(beta1=0), ValueError, "beta1 must be finite and positive, got 0"),
        (lambda: ops.SwiGLU(glu_interleave_size=5)(x), ValueError, "interleave_size=5 and a dimension of 32"),
        (lambda: ops.Sequential(ops.AddExtraInput())(x), ValueError, "take 1 extra inputs, got 0"),
        (lambda: ops.Sequential(ops.Identity())(x, op_kwargs={1: {}}), ValueError, "op_kwargs names 1"),
        (lambda: ops.AllGather, AttributeError, "quire.te.ops.AllGather is not available: layers communicate"),
        (lambda: ops.fused, AttributeError, "never fused"),
    ):
        with pytest.raises(error, match=words):
            make()


def test_a_sequential_is_a_list_of_modules_with_options_for_each():
    linear = ops.Linear(8, 8)
    made = ops.Sequential({"first": linear, "second": ops.Identity()})
    assert list(made.state_dict()) == ["first.weight", "first.bias"] and len(made[:1]) == 1
    x, two = torch.randn(2, 8), ops.Sequential(linear, ops.Linear(8, 8))
    with te.autocast(recipe=recipes.MXFP8BlockScaling()), torch.no_grad():
        for key in (0, -2, linear):
            assert isinstance(made(x, op_kwargs={key: {"fp8_output": True}}), quire.QuantizedTensor)
            assert type(two(x, op_kwargs={key: {"fp8_output": True}})) is torch.Tensor
        for key in (1, -1, two[1]):
            assert isinstance(two(x, op_kwargs={key: {"fp8_output": True}}), quire.QuantizedTensor)


def test_graphed_callables_are_compiled_and_run_under_their_recipe(monkeypatch):
    compile = functools.partial(torch.compile, backend="aot_eager")
    graphs = []
    monkeypatch.setattr(torch, "compile", lambda *args, **options: graphs.append(options) or compile(*args, **options))
    layer, other = te.Linear(32, 32), te.Linear(32, 32)
    x = torch.randn(4, 32)
    mxfp8, current = recipes.MXFP8BlockScaling(), recipes.Float8CurrentScaling()
    with te.autocast(recipe=mxfp8):
        expected, plain = layer(x), other(x)
    with te.autocast(recipe=current):
        active = layer(x)
    keys = list(layer.state_dict())
    made, function = te.make_graphed_callables(
        (layer, lambda x: other(x)), ((x,), (x,)), 3, fp8_enabled=(True, False), fp8_recipe=mxfp8
    )
    assert graphs == [{"fullgraph": True}] * 2
    assert made is layer and list(layer.state_dict()) == keys
    assert torch.equal(made(x), expected) and not torch.equal(function(x), plain)
    with te.autocast(recipe=current):
        assert torch.equal(made(x), active)
    for options, error in (
        ({"pre_warmup_hook": print}, NotImplementedError),
        ({"nothing": 1}, TypeError),
        ({"enabled": (True, True)}, ValueError),
        ({"enabled": True, "fp8_enabled": True}, TypeError),
    ):
        with pytest.raises(error, match="make_graphed_callables"):
            te.make_graphed_callables(te.Linear(8, 8), (x,), **options)


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_layers_of_a_class_than_dynamo_compiles_for_one_code_object_are_graphed(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    def made(layer):
        return lambda x, *, scale=2.0: layer(x) * scale

    layers = tuple(te.Linear(16, 16 * n) for n in range(1, 5))
    x, recipe = torch.randn(4, 16), recipes.MXFP8BlockScaling()
    with te.autocast(recipe=recipe):
        expected = [layer(x) for layer in layers]
    functions = te.make_graphed_callables(tuple(map(made, layers)), ((x,),) * 4, enabled=True, recipe=recipe)
    assert all([torch.equal(one(x), 2 * y) for one, y in zip(functions, expected, strict=True)])
    graphed = te.make_graphed_callables(layers, ((x,),) * 4, enabled=True, recipe=recipe)
    assert all([torch.equal(layer(x), y) for layer, y in zip(graphed, expected, strict=True)])


def test_copies_of_graphed_modules_do_not_compute_with_the_weights_of_the_original(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    made = te.make_graphed_callables(te.Linear(32, 32), enabled=True, recipe=recipes.MXFP8BlockScaling())
    x = torch.randn(4, 32)
    expected = made(x)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded, other = torch.load(file, weights_only=False), copy.deepcopy(made)
    with te.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert torch.equal(loaded(x), expected)
    assert torch.equal(other(x), expected)
    torch.nn.init.zeros_(other.weight)
    assert torch.equal(other(x), other.bias.expand(4, 32)) and torch.equal(made(x), expected)


def test_random_states_by_name_go_on_by_themselves():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    tracker.add("other", 6)
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    expected = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    saved = tracker.get_states()
    for _ in range(2):
        with tracker.fork():
            assert torch.equal(torch.rand(3), torch.rand(3, generator=expected[0]))
        with tracker.fork("other"):
            assert torch.equal(torch.rand(3), torch.rand(3, generator=expected[1]))
        assert torch.equal(torch.get_rng_state(), outside)
    tracker.set_states(saved)
    layer = te.ops.Linear(8, 8, tensor_parallel_mode="column", rng_state_tracker_function=lambda: tracker)
    with tracker.fork("other"):
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(6)))
    assert layer.weight.shape == (8, 8)
    with pytest.raises(RuntimeError, match="must be new"):
        tracker.add("third", 5)
    with pytest.raises(KeyError, match="'third' was not added"), tracker.fork("third"):
        pass
    tracker.reset()
    assert tracker.get_states() == {}


def test_gate_and_linear_part_by_turns_go_both_ways():
    rows = torch.arange(24.0).reshape(12, 2)
    expected = by_turns(rows.T, 3).T
    assert torch.equal(te.deinterleave_glu_tensor(rows, 3), expected)
    assert torch.equal(te.interleave_glu_tensor(expected, 3), rows)
    with pytest.raises(ValueError, match="interleave_size=4 and a dimension of 12"):
        te.interleave_glu_tensor(rows, 4)


FACTORIES = {
    "current_scaling": recipes.Float8CurrentScaling(),
    "float8_block_scaling": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "delayed_scaling": recipes.DelayedScaling(),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_quantizes_as_the_recipe_of_its_name(name):
    custom = recipes.CustomRecipe(qfactory=getattr(quantizer_factories, f"{name}_factory")).frozen()
    assert custom.linear_spec() == FACTORIES[name].frozen().linear_spec()
