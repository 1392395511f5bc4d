"""A QuantizedActivation where PyTorch expects a tensor, against a plain tensor of its decoded values."""

import copy
import pickle

import pytest
import torch

import quire
from every_recipe import ways

pytestmark = pytest.mark.any_device


def make_activation(spec="mxfp8", dtype=torch.float32):
    """A quantized tensor that has a gradient, the tensor that it is of, and a leaf with the decoded values."""
    x = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    q = quire.quantize(x, spec, columnwise=True)
    assert isinstance(q, quire.QuantizedActivation)
    return q, x, quire.quantize(x.detach(), spec).dequantize().requires_grad_()


USES = {
    "functions": lambda y, z: torch.nn.functional.gelu(y) + torch.where(y > 0, y, z) + torch.add(z, other=y),
    "arithmetic": lambda y, z: (2 - y) * z + y / 3 - (z - y) * -y + abs(y) ** 2 + (y % 2) + (1 / (y + 9)),
    "lists": lambda y, z: torch.cat([y, z]) + torch.stack((y, z)).flatten(0, 1),
    "methods": lambda y, z: y.float().sum(-1, keepdim=True) * y.view(4, -1, 64).transpose(0, 1).reshape(z.shape),
    "matmuls": lambda y, z: torch.matmul(y, z.mT) + torch.nn.functional.linear(y, z[0]) + torch.matmul(z, y.mT),
    "parts": lambda y, z: y[1:, ::2] * y[0, 0] + z[1:, ::2],
    "rows": lambda y, z: sum(row * index for index, row in enumerate(y)) + z[0],
    "sizes": lambda y, z: z.reshape(y.size(0), y.dim() * 0 + y.numel() // y.shape[0]) * y.ndim + y.flatten(1),
}


def agree(function, dtype):
    """The results of USES, and their gradients, are those of a plain tensor."""
    q, x, plain = make_activation(dtype=dtype)
    z = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for found, expected in zip(function(q, z), [use(plain, z) for use in USES.values()], strict=True):
        assert type(found) is torch.Tensor and torch.equal(found, expected)
        dy = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(found.dtype)
        dx = torch.autograd.grad(found, x, dy, retain_graph=True)[0]
        wanted = torch.autograd.grad(expected, plain, dy, retain_graph=True)[0]
        torch.testing.assert_close(dx, wanted)  # several uses of it decode several times, and sum in another order


def every_use(q, z):
    return [use(q, z) for use in USES.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_and_methods_take_the_decoded_values(dtype):
    agree(every_use, dtype)


def test_functions_and_methods_take_the_decoded_values_in_a_graph(compiler):
    with torch._functorch.config.patch(donated_buffer=False):  # as for all graphs, with retain_graph
        agree(compiler(every_use), torch.float32)
    assert compiler.graphs == 1


@pytest.mark.parametrize("product", [lambda y, z: y @ z, lambda y, z: z @ y], ids=["left", "right"])
def test_a_graph_refuses_the_operator_of_matmuls_which_dynamo_would_exchange(product, compiler):
    q, _, plain = make_activation()
    z = torch.randn(4, 64, 8)
    assert torch.equal(product(q, z), product(plain, z))
    with pytest.raises(Exception, match="Dynamo exchanges the operands of @"):
        compiler(product)(q, z)


def test_the_result_of_a_layer_can_be_used_as_it_is_in_a_graph(compiler):
    layer, x = quire.Linear(64, 32), torch.randn(8, 64)

    def loss(x):
        with quire.autocast(recipe="mxfp8"):
            y = layer(x, fp8_output=True)
        return (y - 1).square().mean() + y.sum()

    expected = loss(x)
    expected.backward()
    grad, layer.weight.grad = layer.weight.grad, None
    found = compiler(loss)(x)
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer.weight.grad, grad)
    assert compiler.graphs == 1


# On the test device a strict program copies into a carrier that is expanded, which PyTorch refuses.
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.cpu_only)])
def test_it_can_be_an_input_of_an_exported_program(strict, tmp_path):
    class Uses(torch.nn.Module):
        def forward(self, q, x):
            return (q - x).square().sum(-1) + q.mean(-1)

    q, x, plain = make_activation("nvfp4")
    program = torch.export.export(Uses(), (q, x), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    for each in (program, torch.export.load(tmp_path / "program.pt2")):
        assert torch.equal(each.module()(q, x), Uses()(plain, x))


@pytest.mark.cpu_only
def test_backward_and_hooks_are_those_of_the_tensor():
    q, x, _ = make_activation()
    seen = []
    q.register_hook(seen.append)
    q.retain_grad()
    dy = torch.randn(4, 8, 64)
    q.backward(dy)
    assert torch.equal(x.grad, dy) and torch.equal(seen[0], dy) and torch.equal(q.grad, dy)
    assert q.grad_fn is q.carrier.grad_fn and not q.is_leaf and q.requires_grad and q.is_cpu and q.ndim == 3


@ways
@pytest.mark.parametrize(
    "write",
    [
        lambda q: q.add_(1),
        lambda q: q.requires_grad_(),
        lambda q: torch.relu_(q),
        lambda q: torch.add(torch.ones(4, 8, 64), 1, out=q),
        lambda q: torch.nn.functional.relu(q, inplace=True),
        lambda q: torch.nn.functional.dropout(q, 0.5, inplace=True),
        lambda q: torch.relu_(input=q),
        lambda q: torch._foreach_add_([q], 1.0),
        lambda q: torch.max(torch.ones(4, 8, 64), 0, out=(q, torch.zeros(8, 64, dtype=torch.int64))),
    ],
)
def test_it_cannot_be_written_to(write, compiled, compiler):
    q = make_activation()[0]
    before = [buffer.clone() for buffer in q.buffers if buffer is not None]
    with pytest.raises(Exception, match="cannot be written; use dequantize|TypeError|[Oo]bserved exception") as raised:
        (compiler(write, "aot_eager") if compiled else write)(q)
    assert compiled or isinstance(raised.value, TypeError)
    assert all(torch.equal(*both) for both in zip([b for b in q.buffers if b is not None], before, strict=True))


def test_what_it_has_not_says_so():
    q = make_activation()[0]
    for name in ("data_ptr", "untyped_storage", "stride", "no_such_name", "_data", "layers"):
        assert not hasattr(q, name)
    with pytest.raises(AttributeError, match="'QuantizedActivation' object has no attribute 'no_such_name'"):
        _ = q.no_such_name
    with pytest.raises(TypeError, match=r"an operator of quire takes plain tensors.*buffer_list\(\)"):
        torch.ops.quire.quantize(q, "mxfp8", True, False, 0, 0, None)
    assert q == q and q != copy.copy(q) and q in [q] and bool(q)


@pytest.mark.cpu_only
@pytest.mark.parametrize("use", [lambda q: q.rowwise_data, lambda q: q.sum()])
def test_one_of_other_parts_says_what_they_are(use):
    broken = quire.QuantizedActivation(1, 2, 3)
    with pytest.raises(
        TypeError, match="its parts are a carrier .*got a carrier <class 'int'>, buffers 2 and spec_text 3"
    ):
        use(broken)
    assert repr(broken) == "QuantizedActivation(1, 2, 3)"
    with pytest.raises(AttributeError, match="has no shape, because its parts are no tensors"):
        broken.shape  # noqa: B018
    assert not hasattr(broken, "ndim")


@pytest.mark.parametrize("spec", ["fp8_tensor", "fp8_block", "mxfp8", "nvfp4"])
def test_it_has_the_buffers_of_a_quantized_tensor_and_pickles(spec):
    q = make_activation(spec)[0]
    plain = q.detach()
    for name in quire.tensor.BUFFER_NAMES:
        one, other = getattr(q, name), getattr(plain, name)
        assert one is other is None or torch.equal(one, other)
    again = pickle.loads(pickle.dumps(quire.QuantizedActivation(q.carrier.detach(), q.buffers, q.spec_text)))
    assert torch.equal(again.sum(), q.sum()) and torch.equal(copy.deepcopy(again).rowwise_data, q.rowwise_data)
