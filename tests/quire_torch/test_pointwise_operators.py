"""quire::norm and quire::activation: opcheck, gradients, quantized results, one graph for every token count."""

import math

import pytest
import torch

import quire  # noqa: F401  loads the operators
from pairwise import each_value
from steps import assert_rounded

ops = torch.ops.quire
SPECS = ["fp8_tensor", "fp8_row", "fp8_block:pow2", "mxfp8", "mxfp4", "nvfp4:rht", "nvfp4:16x16", "mxfp8:swizzled"]
SHAPES = [(32,), (5, 32), (2, 3, 32), (0, 32), (200, 32)]
ACTIVATIONS = ["gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu"]
NORMS = ["LayerNorm", "RMSNorm"]

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check(op, *args):
    assert set(torch.library.opcheck(op, args, test_utils=UTILITIES).values()) == {"SUCCESS"}


def norm_arguments(shape, normalization="LayerNorm", dtype=torch.float32, grad=True):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=grad)
    weight = torch.randn(shape[-1], dtype=dtype, requires_grad=grad)
    bias = torch.randn(shape[-1], dtype=dtype, requires_grad=grad) if normalization == "LayerNorm" else None
    return x, weight, bias, normalization, 1e-5, False, dtype


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_passes_opcheck(normalization, shape):
    arguments = norm_arguments(shape, normalization)
    check(ops.norm, *arguments)
    check(ops.norm, *arguments, "mxfp8", True, True)
    check(ops.norm, *arguments, "nvfp4:rht", True, True, True)


@pytest.mark.parametrize("spec", SPECS)
def test_norm_and_activation_of_every_family_pass_opcheck(spec):
    check(ops.norm, *norm_arguments((5, 32)), spec, True, True)
    check(ops.norm, *norm_arguments((5, 32), grad=False), spec, True, False)
    check(ops.activation, torch.randn(5, 64, requires_grad=True), "swiglu", torch.bfloat16, spec, True, True)


@pytest.mark.parametrize(
    ("activation", "shape"), each_value([*ACTIVATIONS, "clamped_swiglu:limit=0.75"], SHAPES), ids=str
)
def test_activation_passes_opcheck(activation, shape):
    x = torch.randn(shape, requires_grad=True)
    check(ops.activation, x, activation, torch.float32)
    check(ops.activation, x, activation, torch.float32, "fp8_tensor", True, True, False, torch.tensor([3.0]))


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inner_operators_pass_opcheck(normalization, shape):
    arguments = norm_arguments(shape, normalization, grad=False)
    x, weight = arguments[:2]
    check(ops.norm_fwd, *arguments, "fp8_block", True, True)
    *_, mean, rstd = ops.norm_fwd(*arguments)
    check(ops.norm_bwd, torch.randn(shape), x, weight, mean, rstd, normalization, False, 7)
    check(ops.activation_fwd, x, "swiglu", torch.float16, "fp8_block", True, True)
    check(ops.activation_bwd, torch.randn(*shape[:-1], shape[-1] // 2), x, "swiglu")
    check(ops.activation_bwd, torch.randn(*shape[:-1], shape[-1] // 2), x, "swiglu", torch.tensor([0]))


def test_strided_input_gives_the_bits_of_contiguous_input():
    x = torch.randn(6, 3, 64).transpose(0, 1)[:, ::2, 16:48]
    arguments = norm_arguments((3, 3, 32), grad=False)[1:]
    for plain, strided in zip(ops.norm(x.contiguous(), *arguments), ops.norm(x, *arguments), strict=True):
        assert torch.equal(plain, strided)
    check(ops.norm, x.requires_grad_(), *arguments, "mxfp8", True, True)
    check(ops.activation, x, "gelu", torch.float32)


@pytest.mark.parametrize("keep", [False, True])
def test_a_quantized_result_is_a_carrier_with_the_gradient_of_the_plain_one(keep):
    arguments = norm_arguments((40, 32))
    plain = ops.norm(*arguments)
    dy = torch.randn(40, 32)
    expected = torch.autograd.grad(plain[0], arguments[:3], dy)
    y, *buffers = ops.norm(*arguments, "fp8_block", True, True, keep)
    assert y.shape == (40, 32) and y.requires_grad and not any(b.requires_grad for b in buffers)
    assert y.untyped_storage().nbytes() == (40 * 32 * 4 if keep else 4)
    for e, g in zip(expected, torch.autograd.grad(y, arguments[:3], dy), strict=True):
        assert torch.equal(e, g)
    for e, b in zip(ops.quantize(plain[0].detach(), "fp8_block", True, True), buffers, strict=True):
        assert torch.equal(e.flatten(), b.flatten())


@torch.no_grad()
def magnitudes_of_norm(x, gain, bias, dy, layer):
    """Of y, dx and the gradients of gain and bias: a magnitude, and how often it is rounded (numerics.md 11.2)."""
    rows, columns = x.shape
    mean = x.mean(-1, keepdim=True) * layer
    rstd = ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed, size, dy = ((x - mean) * rstd).abs(), x.abs().mean(-1, keepdim=True), dy.double().abs()
    w = dy * gain.abs()
    # The bound of dx is for given mean and rstd. That of y, without gain and bias, is that of (x - mean) * rstd, and
    # these errors are part of those of dx and of the gradient of the gain.
    of_normed = (columns / 8 + 16) * rstd * (x.abs() + size)
    dx = (columns / 16 + 16) * (w + w.mean(-1, keepdim=True) + normed * (w * normed).mean(-1, keepdim=True))
    dx += of_normed * (w * normed).mean(-1, keepdim=True) + normed * (w * of_normed).mean(-1, keepdim=True)
    dx += (columns / 8 + 16) * w
    yield gain.abs() * rstd * (x.abs() + size) + bias.abs(), columns / 8 + 16
    yield rstd * dx, 1
    yield (dy * normed).sum(0) * (rows + 4) + (dy * of_normed).sum(0), 1
    yield dy.sum(0), rows + 4


def test_gradients_are_those_of_pytorch_in_float64(device):
    torch.manual_seed(1)
    x, weight, bias = torch.randn(70, 48) * 3 + 1, torch.randn(48), torch.randn(48)
    dy = torch.randn(70, 48)
    for normalization in NORMS:
        inputs = [t.clone().to(device).requires_grad_() for t in (x, weight, bias)]
        doubles = [t.double().requires_grad_() for t in (x, weight, bias)]
        layer = normalization == "LayerNorm"
        y = ops.norm(*inputs[:2], inputs[2], normalization, 1e-5, False, torch.float32)[0]
        function = torch.nn.functional.layer_norm if layer else torch.nn.functional.rms_norm
        extra = (doubles[2],) if layer else ()
        expected = function(doubles[0], (48,), doubles[1], *extra, eps=1e-5) + (0 if layer else doubles[2])
        got, grads = (
            torch.autograd.grad(y, inputs, dy.to(device)),
            torch.autograd.grad(expected, doubles, dy.double()),
        )
        bounds = zip((y, *got), (expected.detach(), *grads), magnitudes_of_norm(*doubles, dy, layer), strict=True)
        for found, exact, (magnitude, roundings) in bounds:
            assert_rounded(found, exact, magnitude, roundings)


TORCH = {
    # The tanh form, without the cancellation of PyTorch's own: it errs by 2^-53, which is beyond a bound relative to y.
    "gelu": lambda x: x * torch.sigmoid(2 * (2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x) ** 2,
    "silu": torch.nn.functional.silu,
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def in_torch(activation, x):
    if activation in TORCH:
        return TORCH[activation](x)
    a, gate = x.chunk(2, -1)
    return (torch.sigmoid(a) if activation == "glu" else TORCH[GATED[activation]](a)) * gate


def curve_of(name, x):
    """Its value at x, the sum of the magnitudes of its derivative's terms, and the argument of the sigmoid."""
    if name in ("relu", "srelu"):
        return TORCH[name](x), 2 * x.relu() if name == "srelu" else (x > 0).double(), torch.zeros_like(x)
    c = 2 * (2 / math.pi) ** 0.5
    slope, cubic = {"gelu": (c, 0.044715 * c), "qgelu": (1.702, 0), "silu": (1, 0), "sigmoid": (1, 0)}[name]
    q = x * (slope + cubic * x.square())
    s = q.sigmoid()
    if name == "sigmoid":
        return s, s, q  # of s - s^2
    return x * s, s + (x * s).abs() * (slope + 3 * cubic * x.square()), q


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_gradients_are_those_of_pytorch_in_float64(activation, device):
    x = (torch.randn(33, 64) * 3).clamp(-8, 8)  # where nothing underflows
    ours, theirs = x.clone().to(device).requires_grad_(), x.double().requires_grad_()
    y, expected = ops.activation(ours, activation, torch.float32)[0], in_torch(activation, theirs)
    dy = torch.randn(y.shape)
    (g,), (e,) = torch.autograd.grad(y, ours, dy.to(device)), torch.autograd.grad(expected, theirs, dy.double())
    with torch.no_grad():  # the bounds of numerics.md 11.3
        a, up = theirs.chunk(2, -1) if y.shape != x.shape else (theirs, torch.ones_like(theirs))
        curve = activation if activation in TORCH else GATED.get(activation, "sigmoid")
        value, derivative, argument = curve_of(curve, a)
        roundings = 8 + 4 * argument.abs()
        assert_rounded(y, expected, roundings * expected.abs(), 1)
        magnitudes = [2 * dy.double().abs() * up.abs() * derivative, dy.double().abs() * value.abs()]
        assert_rounded(g, e, torch.cat([roundings * m for m in magnitudes[: x.shape[-1] // y.shape[-1]]], -1), 1)


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
@pytest.mark.parametrize("ends", [[3, 3, 8], [0, 5, 5], [0, 0, 0], [3, 7, 11]], ids=str)
@pytest.mark.parametrize("spec", ["", "mxfp8"])
@pytest.mark.parametrize("activation", ["relu", "swiglu", "gelu"])
def test_rows_beyond_the_last_group_have_no_gradient_whatever_they_hold(activation, spec, ends, width, device):
    x, dy = torch.randn(11, 128), torch.randn(11, 64 if "glu" in activation else 128)
    x[ends[-1] :], dy[ends[-1] :] = torch.nan, torch.inf
    offsets = torch.tensor(ends, dtype=width, device=device)
    rows = x[: ends[-1]].clone().to(device).requires_grad_()
    ours = x.to(device).requires_grad_()
    y = ops.activation(ours, activation, torch.float32, spec, bool(spec), bool(spec), True, None, offsets)[0]
    y.backward(dy.to(device))
    ops.activation(rows, activation, torch.float32)[0].backward(dy[: ends[-1]].to(device))
    assert torch.equal(ours.grad[: ends[-1]], rows.grad) and not ours.grad[ends[-1] :].count_nonzero()


@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked])
def test_every_token_count_shares_one_graph_and_equals_eager(mark):
    def step(x, weight, bias):
        y, *buffers = ops.norm(x, weight, bias, "LayerNorm", 1e-5, True, torch.bfloat16, "mxfp8", True, True, True)
        z, *more = ops.activation(y, "swiglu", torch.bfloat16, "fp8_block", True, True)
        return y, z, *buffers, *more

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    _, weight, bias, *_ = norm_arguments((1, 64))
    for tokens in (3, 32, 33, 200):
        x = torch.randn(tokens, 64)
        mark(x, 0)
        eager, got = step(x, weight, bias), compiled(x, weight, bias)
        for e, c in zip(eager, got, strict=True):
            assert torch.equal(e, c)
        for e, c in zip(*(torch.autograd.grad(r[1].sum(), (weight, bias)) for r in (eager, got)), strict=True):
            assert torch.equal(e, c)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_inductor_gives_the_bits_of_eager_forward_and_backward():
    def step(x, weight, bias, dy):
        y, codes, *_ = ops.norm(x, weight, bias, "LayerNorm", 1e-5, False, torch.float32, "mxfp8", True, True, True)
        z = ops.activation(y, "geglu", torch.float32)[0]
        return z, codes, *torch.autograd.grad(z, (x, weight, bias), dy)

    x, weight, bias, *_ = norm_arguments((70, 64))
    dy = torch.randn(70, 32)
    eager, compiled = step(x, weight, bias, dy), None

    def loss(x, weight, bias):
        y, codes, *_ = ops.norm(x, weight, bias, "LayerNorm", 1e-5, False, torch.float32, "mxfp8", True, True, True)
        return ops.activation(y, "geglu", torch.float32)[0], codes

    z, codes = torch.compile(loss, fullgraph=True)(x, weight, bias)
    compiled = z, codes, *torch.autograd.grad(z, (x, weight, bias), dy)
    for e, c in zip(eager, compiled, strict=True):
        assert torch.equal(e, c)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: ops.norm(x, w[:3], None, "RMSNorm", 1e-5, False, x.dtype), r"weight must be \[hidden_size\]"),
        (lambda x, w: ops.norm(x, w, None, "Norm", 1e-5, False, x.dtype), "must be 'LayerNorm' or 'RMSNorm'"),
        (lambda x, w: ops.norm(x, w, w.half(), "LayerNorm", 1e-5, False, x.dtype), "bias must have the dtype"),
        (lambda x, w: ops.norm(x, w, None, "RMSNorm", -1.0, False, x.dtype), "eps must be finite"),
        (lambda x, w: ops.norm(x, w, None, "RMSNorm", 1e-5, False, torch.int32), "must be float32, float16"),
        (lambda x, w: ops.norm(x, w, None, "RMSNorm", 1e-5, False, x.dtype, "mxfp8"), "at least one direction"),
        (lambda x, w: ops.norm(x, w, None, "RMSNorm", 1e-5, False, x.dtype, "", True), "without a spec"),
        (lambda x, w: ops.norm(x, w, None, "RMSNorm", 1e-5, False, x.dtype, "nvfp4:sr", True), "stochastically"),
        (lambda x, w: ops.norm(x.int(), w, None, "RMSNorm", 1e-5, False, torch.float32), "x must be float32"),
        (lambda x, w: ops.activation(x, "no_such", x.dtype), "names no activation"),
        (lambda x, w: ops.activation(x[:, :7], "swiglu", x.dtype), "gated and takes two halves"),
        (lambda x, w: ops.activation_bwd(x, x, "swiglu"), r"x must be \[4, 16\]; got \[4, 8\]"),
        (lambda x, w: ops.norm_bwd(x, x, w, w, w, "LayerNorm", False, 7), "mean must be what norm_fwd returned"),
        (
            lambda x, w: ops.norm_fwd(x.requires_grad_(), w, None, "RMSNorm", 1e-5, False, x.dtype)[0].sum().backward(),
            "is an inner operator without a gradient",
        ),
    ],
)
def test_bad_input_is_refused_in_words(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.randn(4, 8), torch.randn(8))


def test_a_second_derivative_is_refused_in_words():
    x = torch.randn(4, 8, requires_grad=True)
    (g,) = torch.autograd.grad(ops.activation(x, "gelu", x.dtype)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="activation is once differentiable"):
        g.sum().backward()


def test_the_operators_survive_export():
    class Module(torch.nn.Module):
        def forward(self, x, weight):
            y = ops.norm(x, weight, None, "RMSNorm", 1e-5, False, torch.float32)[0]
            return ops.activation(y, "gelu", torch.float32, "mxfp8", True)[1]

    x, weight = torch.randn(6, 32), torch.randn(32)
    program = torch.export.export(Module(), (x, weight), dynamic_shapes=({0: torch.export.Dim("tokens")}, None))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "quire.norm.default" in names and "quire.activation.default" in names
    more = torch.randn(40, 32)
    assert torch.equal(program.module()(more, weight), Module()(more, weight))
