"""quire.LayerNorm and quire.RMSNorm: PyTorch's numbers, compiled equals eager."""

import copy

import pytest
import torch

import quire
from steps import assert_rounded

NORMS = {
    "layer": (quire.LayerNorm, torch.nn.functional.layer_norm),
    "rms": (quire.RMSNorm, torch.nn.functional.rms_norm),
}


@pytest.fixture(params=NORMS)
def kind(request):
    return request.param


@pytest.fixture
def make(kind, device):
    """(shape, **options) -> a norm whose parameters matter."""

    def build(shape, **options):
        torch.manual_seed(3)
        module = NORMS[kind][0](shape, **options)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        return module.to(device)

    return build


def reference(kind, module, x):
    """In float64."""
    weight = module.weight.cpu().double() + (1 if module.zero_centered_gamma else 0)
    extra = () if module.bias is None else (module.bias.cpu().double(),)
    return NORMS[kind][1](x.cpu().double(), module.normalized_shape, weight, *extra, eps=module.eps)


def magnitudes(kind, module, x, dy):
    """The formulas of numerics.md 11.2 with the absolute value of each term: of y, and of each gradient."""
    rows, dy, gain = x.detach().cpu().double().reshape(-1, 48), dy.double().abs().reshape(-1, 48), module.weight
    gain = (gain.detach().cpu().double() + (1 if module.zero_centered_gamma else 0)).abs().flatten()
    centered = rows - rows.mean(1, keepdim=True) if kind == "layer" else rows
    rstd = (centered.square().mean(1, keepdim=True) + module.eps).rsqrt()
    normed, w = (rows.abs() + rows.abs().mean(1, keepdim=True)) * rstd, dy * gain
    dx = rstd * (w + w.mean(1, keepdim=True) + normed * (w * normed).mean(1, keepdim=True))
    sums = [(dy * normed).sum(0), dy.sum(0)]
    beta = 0 if module.bias is None else module.bias.detach().cpu().double().abs().flatten()
    return normed * gain + beta, [dx, *sums[: 1 if module.bias is None else 2]]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [48, (48,), (4, 12)])
def test_result_and_gradients_are_those_of_float64(kind, make, shape, zero_centered, device):
    module = make(shape, zero_centered_gamma=zero_centered, eps=1e-3)
    x = torch.randn(3, 5, *module.normalized_shape).to(device).requires_grad_()
    y, expected = module(x), reference(kind, module, x)
    dy = torch.randn(y.shape)
    of_y, of_gradients = magnitudes(kind, module, x, dy)
    roundings = 48 / 8 + 16  # of a value of y, and of a normalized one; 15 rows are summed in a column
    assert_rounded(y, expected, of_y.view(y.shape), roundings)
    inputs = [x, *module.parameters()]
    got = torch.autograd.grad(y, inputs, dy.to(device))
    exact = torch.autograd.grad(expected, inputs, dy.double())  # rounded to float32 once
    for g, e, of_g, own in zip(got, exact, of_gradients, (48 / 16 + 16, 15 + 4, 15), strict=False):
        assert_rounded(g, e.double(), of_g.view(g.shape), roundings + own + 1)


# Half an ulp of the result is 2^-9 of it; the sums in float32 add less than that again. PyTorch's sums on CPUs are of
# bfloat16, which docs/from-transformer-engine.md says.
@pytest.mark.parametrize("rows", [64, 4096])
def test_gradients_of_bfloat16_parameters_are_rounded_once(rows, kind, make, device):
    module = make(128).bfloat16()
    exact = copy.deepcopy(module).cpu().double()
    x, dy = torch.randn(rows, 128).bfloat16(), (torch.randn(rows, 128) + 0.1).bfloat16()
    expected = torch.autograd.grad(reference(kind, exact, x), [*exact.parameters()], dy.double())
    found = torch.autograd.grad(module(x.to(device)), [*module.parameters()], dy.to(device))
    for got, e in zip(found, expected, strict=True):
        assert (got.cpu().double() - e).norm() <= 2**-8 * e.norm()
    if kind == "layer":
        theirs = torch.nn.LayerNorm(128, eps=module.eps).bfloat16()
        theirs.load_state_dict(module.state_dict())
        for got, e in zip(torch.autograd.grad(theirs(x), [*theirs.parameters()], dy), expected, strict=True):
            assert (got.double() - e).norm() > 2**-8 * e.norm()


def test_the_result_has_the_dtype_of_autocast_or_of_x(make):
    module = make(32)
    assert module(torch.randn(3, 32)).dtype == torch.float32
    assert module(torch.randn(3, 32).half()).dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        y = module(torch.randn(3, 32, requires_grad=True))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager_bit_for_bit(make, backend, equal_bits):
    module = make(96).bfloat16()
    x = torch.randn(70, 96).bfloat16().requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    results = []
    for function in (module, compiled):
        y = function(x)
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))])
    assert all(map(equal_bits, *results))


def test_parameters_are_named_and_initialised_like_pytorchs(kind):
    ours, theirs = NORMS[kind][0](16), {"layer": torch.nn.LayerNorm, "rms": torch.nn.RMSNorm}[kind](16)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    assert NORMS[kind][0](16, zero_centered_gamma=True).weight.eq(0).all()
    assert ours.weight.eq(1).all()
    module = NORMS[kind][0](16, params_dtype=torch.bfloat16, device="meta")
    assert module.weight.is_meta and module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_no_token_count_is_special(make, rows, device):
    module = make(32)
    x = torch.randn(rows, 32).to(device).requires_grad_()
    module(x).sum().backward()
    assert x.grad.shape == (rows, 32) and module.weight.grad.cpu().isfinite().all()


def test_bad_input_is_refused_in_words(kind, make):
    norm = NORMS[kind][0]
    with pytest.raises(ValueError, match="one or more sizes"):
        norm(())
    with pytest.raises(TypeError, match=f"quire.{norm.__name__}: there is no option 'colour'; the options are"):
        norm(4, colour=1)
    with pytest.raises(ValueError, match="dtype and params_dtype"):
        norm(4, params_dtype=torch.half, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x must be \[\*, 32\], got \[3, 31\]"):
        make(32)(torch.randn(3, 31))
    with pytest.raises(RuntimeError, match="must be float32, float16 or bfloat16"):
        make(32)(torch.zeros(3, 32, dtype=torch.int32))
