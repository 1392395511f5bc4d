"""Inner operators, as outer ones and their backward passes call them: past the dispatcher, on each device that has
kernels, unless somebody besides the kernel has a say."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import quire  # noqa: F401  loads the operators
from pytorch import Operators

ops = torch.ops.quire
MAP = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6], dtype=torch.int32).view(8, 1)
#: An outer operator of x [8, 32], and those that it and its backward pass call.
CALLS = {
    "linear": (lambda x: ops.linear(x, x, None, "x=mxfp8,w=mxfp8,dy=mxfp8", x.dtype), ["linear_fwd", "linear_bwd"]),
    "norm": (lambda x: ops.norm(x, x[0], None, "RMSNorm", 1e-5, False, x.dtype)[0], ["norm_fwd", "norm_bwd"]),
    "activation": (lambda x: ops.activation(x, "gelu", x.dtype)[0], ["activation_fwd", "activation_bwd"]),
    "permute": (lambda x: ops.permute(x, MAP.to(x.device), None, 8), ["permute_fwd", "unpermute_fwd"]),
    "unpermute": (lambda x: ops.unpermute(x, MAP.to(x.device), None), ["unpermute_fwd", "permute_fwd"]),
}
every_call = pytest.mark.parametrize(("call", "inner"), CALLS.values(), ids=CALLS)


@pytest.fixture
def x(device):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.fixture
def dispatched(device):
    """Puts other kernels under the dispatcher. They fail, and note here which inner operator was called."""
    seen, library = [], torch.library.Library("quire", "IMPL")

    def kernel_of(name):
        def kernel(*args, **kwargs):
            seen.append(name)
            raise LookupError(name)

        return kernel

    for name in sorted({name for _, inner in CALLS.values() for name in inner}):
        library.impl(name, kernel_of(name), "CPU" if device.type == "cpu" else "PrivateUse1")
    yield seen
    library._destroy()


def value_and_gradient(call, x):
    x = x.detach().requires_grad_()
    y = call(x)
    return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
@every_call
def test_inner_operators_are_called_past_the_dispatcher(device, x, dispatched, call, inner):
    expected = value_and_gradient(call, x.cpu()) if device.type != "cpu" else None
    got = value_and_gradient(call, x)
    with torch.no_grad():
        assert torch.equal(call(x).cpu(), got[0].cpu())
    assert dispatched == []
    if expected is not None:
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))


@every_call
def test_a_mode_sees_inner_operators(device, x, call, inner):
    with Operators() as mode:
        value_and_gradient(call, x)
    assert all(f"quire.{name}.default" in mode.seen for name in inner)


@every_call
def test_a_profiler_sees_inner_operators(device, x, call, inner):
    with torch.profiler.profile() as profile:
        value_and_gradient(call, x)
    assert {f"quire::{name}" for name in inner} <= {event.key for event in profile.key_averages()}


@every_call
def test_a_tracer_records_inner_operators(device, x, call, inner):
    code = make_fx(lambda t: value_and_gradient(call, t)[1])(x).code
    assert all(f"quire.{name}.default" in code for name in inner)


@every_call
def test_fake_tensors_run_no_kernel(device, x, call, inner):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y, dx = value_and_gradient(call, mode.from_tensor(x))
    assert y.shape == dx.shape[:1] + y.shape[1:] and y.device.type == dx.device.type == device.type
    assert isinstance(y, torch._subclasses.FakeTensor) and isinstance(dx, torch._subclasses.FakeTensor)


@every_call
def test_transforms_give_the_gradient_of_the_tape(device, x, call, inner):
    dx = torch.func.grad(lambda t: call(t).sum())(x)
    assert torch.equal(dx.cpu(), value_and_gradient(call, x)[1].cpu())


@every_call
def test_forward_mode_is_refused(device, x, call, inner):
    with pytest.raises((RuntimeError, NotImplementedError), match="no forward-mode derivative"):
        torch.func.jvp(call, (x,), (x,))


@every_call
def test_under_autocast_the_bits_are_the_same(device, x, call, inner):
    expected = value_and_gradient(call, x)
    with torch.autocast(device.type, torch.bfloat16):
        got = value_and_gradient(call, x)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, expected, strict=True))
