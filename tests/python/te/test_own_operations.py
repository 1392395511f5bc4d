"""te.ops: names of extra inputs and outputs, operations that a script defines itself, and options of operations,
against plain PyTorch."""

import copy
import io

import pytest
import torch

import quire
import quire.te.pytorch as te
from every_recipe import ways
from quire.te.pytorch import ops
from steps import assert_rounded

pytestmark = pytest.mark.any_device


def assert_close(found, wanted, **tolerances):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **tolerances)


def residual(**options):
    """x -> relu(x + bias) + x, whose second x goes by a name, and then + 3 x by another one."""
    first, second = ops.MakeExtraOutput(), ops.MakeExtraOutput()
    assert first.set_extra_output_channel(0, "residual", **options) is first
    second.set_extra_output_channel(0, "other", output_to_caller=False)
    add, scaled = ops.AddExtraInput(), ops.AddExtraInput()
    assert add.set_extra_input_channel(0, "residual") is add
    scaled.set_extra_input_channel(0, "other")
    bias = ops.Bias(8)
    torch.nn.init.ones_(bias.bias)
    return ops.Sequential(first, second, bias, ops.ReLU(), add, scaled, ops.AddExtraInput())


@ways
@pytest.mark.parametrize("returned", [False, True])
def test_names_connect_operations(returned, compiled, compiler):
    model = residual(output_to_caller=returned)
    x, extra = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    found = (compiler(model) if compiled else model)(x, extra)
    y = torch.relu(x + model[2].bias) + 2 * x + extra
    found, wanted = (found, (y, x)) if returned else ((found,), (y,))
    assert_close(found, wanted)
    leaves, dy = [x, extra, model[2].bias], [torch.randn(3, 8) for _ in wanted]
    assert_close(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(wanted, leaves, dy))
    for other in (copy.deepcopy(model), saved_and_loaded(model)):
        again = other(x, extra)
        assert_close(again if returned else (again,), wanted)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_names_can_change_between_calls():
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    model, x = ops.Sequential(make, add), torch.randn(4)
    assert_close(model(x, 2 * x), (3 * x, x))
    make.set_extra_output_channel(0, "x", output_to_caller=False)
    add.set_extra_input_channel(0, "x")
    assert_close([model(x)], [2 * x])
    make.set_extra_output_channel(0, None)
    add.set_extra_input_channel(0, None)
    assert_close(model(x, 2 * x), (3 * x, x))
    assert ops.MakeExtraOutput.output_channels == {}


def test_names_that_do_not_fit_are_refused_before_anything_is_computed():
    def add(name="x"):
        return ops.AddExtraInput().set_extra_input_channel(0, name)

    def make(name="x"):
        return ops.MakeExtraOutput().set_extra_output_channel(0, name)

    for modules, words in (
        ([add()], r"'x', which has no producer.* those before it have \[\]"),
        ([make("y"), add()], r"has no producer.* have \['y'\]"),
        ([add(), make()], "has no earlier producer"),
        ([make(), torch.nn.Identity(), add()], "has no producer"),
        ([make(), make(), add()], "'x', which then has multiple producers"),
    ):
        ran = []
        first = ops.Identity()
        first.register_forward_hook(lambda *args, ran=ran: ran.append(args))
        with pytest.raises(ValueError, match=words):
            ops.Sequential(first, *modules)(torch.ones(2))
        assert not ran
    # Another run of operations has names of its own.
    assert_close(
        ops.Sequential(make(), add(), torch.nn.Identity(), make(), add())(torch.ones(2))[0][None], [4 * torch.ones(2)]
    )
    for call, error, words in (
        (
            lambda: ops.AddExtraInput().set_extra_input_channel(1, "x"),
            IndexError,
            "index 1 is out of range.* 1 extra in",
        ),
        (lambda: ops.MakeExtraOutput().set_extra_output_channel(-1, "x"), IndexError, "index -1 is out of range"),
        (lambda: ops.ReLU().set_extra_input_channel(0, "x"), IndexError, "has 0 extra inputs"),
        (lambda: make(""), ValueError, "non-empty string or None, got ''"),
        (lambda: add(5), ValueError, "non-empty string or None, got 5"),
        (
            lambda: ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=1),
            TypeError,
            "a bool, got 1",
        ),
    ):
        with pytest.raises(error, match=words):
            call()


class Scale(ops.BasicOperation):
    """A factor that is trained."""

    def __init__(self, start=1.5):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(start))

    def op_forward(self, ctx, input_, *, plus=0.0, **unused):
        if ctx.requires_grad:
            ctx.save_for_backward(self.scale, input_)
        return self.scale * input_ + plus

    def op_backward(self, ctx, grad_output):
        scale, x = ctx.saved_tensors
        return scale * grad_output, ((x * grad_output).sum(),)


class Products(ops.BasicOperation):
    """x; x, whose gradient counts three times, x times an extra input, and the sign of x as extra outputs."""

    num_extra_inputs, num_extra_outputs = 1, 3

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **unused):
        (factor,) = basic_op_extra_inputs[0]
        basic_op_ctxs[0].save_for_backward(input_, factor)
        return input_, [(input_, input_ * factor, (input_ > 0).int())]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, factor = basic_op_ctxs[0].saved_tensors
        dx, dfactor = grad_output, None
        same_x, product, sign = basic_op_grad_extra_outputs[0]
        assert sign is None or torch.compiler.is_compiling()
        dx = dx if same_x is None else dx + 3 * same_x
        if product is not None:
            dx, dfactor = dx + factor * product, x * product
        return dx, [()], [(dfactor,)]


@ways
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1, 2), (2,)], ids=str)
def test_an_operation_of_a_script_has_the_gradients_that_it_says(used, compiled, compiler):
    model = ops.Sequential(ops.Identity(), Scale(), Products(), ops.SiLU())
    scale = model[1].scale

    def plain(x, factor):
        x = scale * x
        return torch.nn.functional.silu(x), 3 * x - 2 * x.detach(), x * factor

    leaves = [torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True), scale]
    y, *extra, sign = (compiler(model) if compiled else model)(*leaves[:2])
    wanted, found = plain(*leaves[:2]), (y, *extra)
    assert_close(found, wanted)
    assert torch.equal(sign, (wanted[1] > 0).int()) and not sign.requires_grad
    dy = [torch.randn(4, 8) for _ in used]
    ours, theirs = (
        torch.autograd.grad([each[i] for i in used], leaves, dy, allow_unused=True, materialize_grads=True)
        for each in (found, wanted)
    )
    assert_close(ours, theirs)
    with torch.no_grad():
        (y, *_) = (compiler(model) if compiled else model)(*leaves[:2])
    assert not y.requires_grad
    assert_close([y], [wanted[0].detach()])


class Doubled(ops.BasicOperation):
    """2 x if its context says that a gradient is wanted, else x."""

    def op_forward(self, ctx, input_, **unused):
        return input_ * (2 if ctx.requires_grad else 1)

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


@ways
@pytest.mark.parametrize("grad", [False, True])
def test_a_context_says_in_graphs_what_it_says_in_eager_mode(grad, compiled, compiler):
    # PyTorch's own contexts always say that a gradient is wanted.
    model, x = ops.Sequential(Doubled()), torch.randn(4, requires_grad=grad)
    assert torch.equal((compiler(model) if compiled else model)(x), 2 * x)


def test_an_operation_of_a_script_takes_decoded_values_and_options():
    x = torch.randn(4, 32, requires_grad=True)
    with te.autocast(recipe=quire.recipe.MXFP8BlockScaling()):
        model = ops.Sequential(ops.Quantize(), Scale(2.0))
        y = model(x, op_kwargs={1: {"plus": 1.0}})
    expected = quire.quantize(x.detach(), "mxfp8").dequantize()
    assert torch.equal(y, 2 * expected + 1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2)) and model[1].scale.grad == expected.sum()
    assert list(model.state_dict()) == ["1.scale"]
    assert_close([saved_and_loaded(Scale(3.0))(x)], [3 * x])


def test_what_is_wrong_with_an_operation_of_a_script_is_said():
    class Nothing(ops.BasicOperation):
        num_extra_outputs = 1

    class TooMany(Scale):
        def op_backward(self, ctx, grad_output):
            return grad_output, (None, None)

    x = torch.ones(2, requires_grad=True)
    for call, error, words in (
        (lambda: ops.BasicOperation()(x), NotImplementedError, "define op_forward and op_backward"),
        (lambda: Nothing()(x), RuntimeError, "must define fuser_forward; it has 0 and 1"),
        (lambda: Scale()(x, x), TypeError, "Scale: it takes 0 extra inputs, got 1"),
        (lambda: TooMany()(x).sum().backward(), RuntimeError, "expected 1 gradients of parameters, got 2"),
        (lambda: ops.FusedOperation([]), ValueError, "one or more operations, got none"),
    ):
        with pytest.raises(error, match=words):
            call()


@ways
def test_a_fused_operation_computes_its_parts_one_by_one(compiled, compiler):
    class Fused(ops.FusedOperation):
        def __init__(self, scale, add):
            super().__init__((scale, add))

        def fuser_forward(self, *args, **options):
            raise AssertionError

    scale, add = Scale(), ops.AddExtraInput()
    fused = Fused(scale, add)
    assert all([isinstance(each, ops.FusibleOperation) for each in (fused, scale, add, ops.Linear(8, 8), ops.GELU())])
    assert fused.is_fused_op and not scale.is_fused_op
    x, extra = torch.randn(3), torch.randn(3)
    model = ops.Sequential(ops.Identity(), fused)
    assert_close([(compiler(model) if compiled else model)(x, extra)], [1.5 * x + extra])
    assert_close([fused(x, extra)], [1.5 * x + extra])
    assert_close([ops.Sequential(fused)(x, extra, op_kwargs={scale: {"plus": 1.0}})], [1.5 * x + extra + 1])
    for register in (
        ops.register_forward_fusion,
        ops.register_backward_fusion,
        ops.register_forward_backward_fusion,
    ):
        with pytest.warns(UserWarning, match=f"{register.__name__}: quire never fuses operations"):
            register(lambda operations, **unused: [Fused(*operations)], prepend=True)


@ways
def test_a_sum_in_place_is_in_the_memory_of_the_extra_input(compiled, compiler):
    x, extra = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    wanted = (x + extra).detach()
    model = ops.Sequential(ops.AddExtraInput(in_place=True))
    y = (compiler(model) if compiled else model)(x, extra)
    assert torch.equal(y, wanted) and torch.equal(extra, wanted)
    assert (y.data_ptr() == extra.data_ptr()) != compiled
    dy = torch.randn(3, 4)
    assert all([torch.equal(gradient, dy) for gradient in torch.autograd.grad(y, [x, extra], dy)])


CURVES = {
    "gelu": ops.GELU,
    "swiglu": lambda **options: ops.SwiGLU(glu_interleave_size=8, **options),
    "soft caps": lambda **options: ops.SiTUGLU(beta1=2, beta2=3, **options),
}


def gradient_of_soft_caps(x, dy):
    """In float64, and with the absolute value of each term. On the way to it tanh has 4 roundings, and a sigmoid 8."""
    (gate, linear), dy = x.detach().double().chunk(2, -1), dy.double()
    of_gate, of_linear, sigmoid = torch.tanh(gate / 2), torch.tanh(linear / 3), torch.sigmoid(gate)
    results = []
    for sign in (-1, 1):  # the second time, of magnitudes
        slope = (1 + sign * of_gate**2) * sigmoid + 2 * of_gate * sigmoid * (1 + sign * sigmoid)
        dlinear = 2 * dy * of_gate * sigmoid * (1 + sign * of_linear**2)
        results.append(torch.cat([3 * dy * of_linear * slope, dlinear], 1))
        of_gate, of_linear, dy = of_gate.abs(), of_linear.abs(), dy.abs()
    return results


@ways
@pytest.mark.parametrize("name", CURVES)
def test_backward_computes_from_codes_of_an_input_and_keeps_nothing_else(name, compiled, compiler):
    plain, cached = CURVES[name](), CURVES[name](cache_quantized_input=True)
    x = torch.randn(6, 64, requires_grad=True)
    rounded = quire.quantize(x.detach(), "fp8_tensor").dequantize().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = cached(x)
    assert len(kept) == 1 and isinstance(kept[0], quire.QuantizedTensor)
    y = (compiler(cached) if compiled else cached)(x)
    assert torch.equal(y, plain(x))
    dy = torch.randn_like(y)
    (found,), (wanted,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(plain(rounded), rounded, dy)
    if name == "soft caps":  # PyTorch's functions, in another order than that of its own gradients
        assert_rounded(found, *gradient_of_soft_caps(rounded, dy), 40)
    else:
        assert torch.equal(found, wanted)
    assert not torch.equal(found, torch.autograd.grad(plain(x), x, dy)[0])


def mlp(recompute):
    torch.manual_seed(3)
    return ops.Sequential(
        ops.GroupedLinear(2, 32, 64),
        ops.ScaledSReLU(activation_recompute_in_mlp=recompute),
        ops.GroupedLinear(2, 64, 32),
    )


@ways
@pytest.mark.parametrize("recipe", [None, quire.recipe.MXFP8BlockScaling()], ids=["none", "mxfp8"])
def test_an_activation_that_is_computed_again_is_not_kept(recipe, compiled, compiler):
    x, sizes, scales = torch.randn(48, 32, requires_grad=True), torch.tensor([16, 32]), torch.rand(48)
    results, kept = [], []
    for recompute in (False, True):
        model, saved = mlp(recompute), []
        function = compiler(model) if compiled and recompute else model
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t),
            te.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            y = function(x, sizes, scales.requires_grad_(), sizes)
        kept.append(saved)
        leaves = [x, scales, *model.parameters()]
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    assert all([torch.equal(one, other) for one, other in zip(*results, strict=True)])

    def wide(tensors):
        return sum([t.numel() for t in tensors if t.shape[-1:] == (64,) and len(t) == 48])

    assert recipe is not None or wide(kept[1]) == 48 * 64 < wide(kept[0])
    alone = ops.ScaledSReLU(activation_recompute_in_mlp=True)
    assert_close([alone(x, scales)], [torch.relu(x) ** 2 * scales[:, None]])
    for operation in (ops.ScaledSwiGLU, ops.ScaledSiTUGLU, ops.ScaledClampedQGeGLU):
        assert operation().activation_recompute_in_mlp is False
        with pytest.raises(ValueError, match="does not support activation recomputation; .* te.checkpoint"):
            operation(activation_recompute_in_mlp=True)


@pytest.mark.parametrize("in_place", [False, True])
def test_extra_inputs_can_be_quantized(in_place):
    x, extra = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32, requires_grad=True)
    q = quire.quantize(extra, "mxfp8")
    values = q.dequantize().detach()
    y = ops.AddExtraInput(in_place=in_place)(x, q)
    product = Products()(x, q)[2]
    assert torch.equal(y, x + values) and torch.equal(product, x * values)
    for result, wanted in ((y, (torch.ones(4, 32), torch.ones(4, 32))), (product, (values, x))):
        found = torch.autograd.grad(result, [x, extra], torch.ones(4, 32), retain_graph=True)
        assert all([torch.equal(one, other) for one, other in zip(found, wanted, strict=True)])
    stored = quire.quantize(extra.detach(), "mxfp8")
    y = ops.AddExtraInput(in_place=in_place)(x.detach(), stored)
    wanted = x.detach() + values
    if in_place:
        wanted = quire.quantize(wanted, "mxfp8").dequantize()
        assert torch.equal(stored.dequantize(), wanted)
    assert torch.equal(y.dequantize() if in_place else y, wanted)


def test_groups_take_decoded_values():
    grouped, x, sizes = ops.GroupedLinear(2, 32, 16), torch.randn(6, 32, requires_grad=True), torch.tensor([2, 4])
    with te.autocast(recipe=quire.recipe.MXFP8BlockScaling()):
        q, found = ops.Quantize()(x), ops.Sequential(ops.Quantize(), grouped)(x, sizes)
        wanted = grouped(q.dequantize(), sizes)
    assert torch.equal(found, wanted)
    dy = torch.randn(6, 16)
    assert torch.equal(torch.autograd.grad(found, x, dy)[0], torch.autograd.grad(wanted, x, dy)[0])


@ways
@pytest.mark.parametrize("single", [False, True])
def test_a_bias_of_groups_is_scaled_by_row(single, compiled, compiler):
    grouped = ops.GroupedLinear(3, 32, 16, scale_bias=True, single_grouped_bias=single, dtype=torch.bfloat16)
    x = torch.randn(12, 32, dtype=torch.bfloat16, requires_grad=True)
    scales, sizes = torch.rand(12, requires_grad=True), torch.tensor([4, 0, 6], dtype=torch.int32)
    y = (compiler(grouped) if compiled else grouped)(x, sizes, scales)
    names = [name for name, _ in grouped.named_parameters()]

    def in_float64(x, scales, *parameters):
        weights, biases = (
            [t for name, t in zip(names, parameters, strict=True) if name.startswith(kind)]
            for kind in ("weight", "bias")
        )
        biases = biases if len(biases) == 3 else biases[0]
        rows = [slice(0, 4), slice(4, 10)]
        parts = [x[r] @ weights[e].T + biases[e] * scales[r, None] for r, e in zip(rows, (0, 2), strict=True)]
        return torch.cat([*parts, torch.zeros(2, 16, dtype=torch.float64)])

    dy, given = torch.randn(12, 16).bfloat16(), [x, scales, *grouped.parameters()]
    results = []
    for absolute in (False, True):
        wide = [(t.abs() if absolute else t).detach().double().requires_grad_() for t in given]
        wanted = in_float64(*wide)
        gradient = dy.double().abs() if absolute else dy.double()
        gradients = torch.autograd.grad(wanted, wide, gradient, allow_unused=True, materialize_grads=True)
        results.append([wanted.detach(), *gradients])
    found = torch.autograd.grad(y, given, dy)
    for one, exact, magnitude in zip([y, *found], *results, strict=True):
        # A product and a scaled bias may be rounded to bfloat16 first, each by 2^16 roundings to float32.
        assert_rounded(one, exact, magnitude, 2 * 2**16 + 32 + 2)
    out = torch.full((12, 16), 7.0, dtype=torch.bfloat16)
    again = (compiler(grouped) if compiled else grouped)(x, sizes, scales, out=out)
    assert (again.data_ptr() == out.data_ptr()) != compiled and torch.equal(out, again)
    assert torch.equal(out[:10], y[:10]) and (out[10:] == 7).all()
    assert_close(torch.autograd.grad(again, [x, scales, *grouped.parameters()], dy), found)
    assert ops.GroupedLinear(3, 32, 16, bias=False, scale_bias=True).num_extra_inputs == 1
    with pytest.raises(TypeError, match="takes 2 extra inputs, split_sizes and scales of the bias; got 1"):
        grouped(x, sizes)
    with pytest.raises(ValueError, match=r"scales must have a number for each of the 12 rows, got \[3\]"):
        grouped(x, sizes, torch.ones(3))
