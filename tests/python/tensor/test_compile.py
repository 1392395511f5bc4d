"""QuantizedTensor in compiled graphs: taken, made, used and returned. fullgraph, and the bits of eager."""

import pytest
import torch

import quire
from quire import QuantizedTensor, QuantSpec
from steps import same

pytestmark = pytest.mark.any_device

SPECS = ["fp8_tensor", "fp8_row", "fp8_block:128x128", "mxfp8", "mxfp4", "nvfp4:16x16", "nvfp4:rht", "nvfp4:row_scaled"]


@pytest.fixture(params=SPECS)
def spec(request):
    return request.param


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def use(q):
    """What modules and people read of one."""
    data, scale, amax, *_ = q.buffer_list()
    flags = (amax is None, q.columnwise_data is None, isinstance(q, QuantizedTensor), q.spec_text, q.shape, q.dtype)
    views = (q.view(2, -1, q.shape[-1]), q.detach(), q.clone(), q.to(torch.bfloat16))
    plain = (data + 1, scale, q.rowwise_data, q.columnwise_scale, q.dequantize(), q.dequantize(torch.float16))
    return flags, views, plain, q + 1, q.t(), q[:, 1:], q.carrier().shape, quire.dequantize(q)


@pytest.mark.parametrize("columnwise", [False, True])
def test_made_and_used_and_returned(compiler, spec, columnwise):
    def function(x):
        q = quire.quantize(x, spec, columnwise=columnwise)
        return q, use(q)

    x = values(32, 64, dtype=torch.bfloat16)
    assert same(compiler(function)(x), function(x)) and compiler.graphs == 1


@pytest.mark.parametrize("columnwise", [False, True])
def test_taken_and_used_and_returned(compiler, spec, columnwise):
    def function(q):
        return q, use(q), q.spec == QuantSpec(spec)

    q = quire.quantize(values(32, 64), spec, columnwise=columnwise)
    assert same(compiler(function)(q), function(q)) and compiler.graphs == 1


def test_a_parameter_is_read(compiler, spec):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(quire.quantize(values(32, 64), spec, columnwise=True))

    def function(x):
        buffers = layer.weight.buffer_list()
        return (
            x + 1,
            buffers[0] + 1,
            layer.weight.columnwise_scale,
            layer.weight.spec.text,
            layer.weight.carrier().shape,
        )

    assert same(compiler(function)(values(3)), function(values(3))) and compiler.graphs == 1


def test_from_one_graph_to_another(compiler, spec):
    make, read = compiler(lambda x: quire.quantize(x, spec)), compiler(lambda q: q.dequantize() * 2)
    x = values(32, 64)
    assert same(read(make(x)), quire.quantize(x, spec).dequantize() * 2) and compiler.graphs == 2
    assert same(make(x).dequantize(), quire.quantize(x, spec).dequantize())


def test_row_counts_share_a_graph(compiler, spec):
    def function(x):
        q = quire.quantize(x, spec, columnwise=True)
        return q, q.dequantize(), q.buffer_list()[0] + 1

    compiled = compiler(function, dynamic=True)
    for rows in (140, 133, 300, 260):  # no size of a buffer becomes 1 (src/quire_torch/ops/README.md)
        x = values(rows, 64)
        assert same(compiled(x), function(x))
    assert compiler.graphs == 1
    compiled = compiler(lambda q: (q.dequantize(), q.view(1, -1, 64), q.rowwise_data + 1))
    before = compiler.graphs
    for rows in (140, 133, 300, 260, 400, 500):
        q = quire.quantize(values(rows, 64), spec)
        assert same(compiled(q), (q.dequantize(), q.view(1, -1, 64), q.rowwise_data + 1))
    assert compiler.graphs <= before + 3  # a static one; sizes that happened to be equal are taken for one


def test_a_graph_of_one_spec_or_direction_is_not_run_on_another(compiler):
    compiled = compiler(lambda q: (q.dequantize(), q.columnwise_data is None))
    for spec, columnwise in (("mxfp8", False), ("mxfp8:e5m2", False), ("mxfp8", True), ("mxfp8", False)):
        q = quire.quantize(values(32, 64), spec, columnwise=columnwise)
        assert same(compiled(q), (q.dequantize(), not columnwise))
    assert compiler.graphs == 3


def test_writes_in_a_graph_are_writes(compiler, spec):
    def function(q, x):
        q.mul_(0.5)
        q.add_(x)
        q.copy_(q * 2)
        return q + 1

    eager, traced = (quire.quantize(values(32, 64), spec, columnwise=True) for _ in range(2))
    expected = function(eager, values(64))
    assert same(compiler(function)(traced, values(64)), expected) and same(traced, eager)


def test_a_gradient_passes_decoding(compiler):
    q = quire.quantize(values(32, 64), "nvfp4:16x16").requires_grad_()

    def function(q, x):
        return torch.nn.functional.linear(x, q.dequantize()).sum() + (q * x[:1]).sum()

    grads = []
    for run in (function, compiler(function)):
        q.grad = None
        x = values(5, 64).requires_grad_()
        run(q, x).backward()
        grads.append((q.grad, x.grad))
        assert type(q.grad) is torch.Tensor
    assert same(*grads)


def test_inductor_gives_the_same_bytes(compiler):
    def function(x, given):
        q = quire.quantize(x * 2, "nvfp4:16x16", columnwise=True)
        return q, q.dequantize() + given.dequantize(), given.rowwise_data + 1

    x, given = values(32, 64), quire.quantize(values(32, 64), "mxfp8")
    assert same(compiler(function, backend="inductor")(x, given), function(x, given))


def test_our_operators_refuse_it_in_a_graph(compiler):
    q = quire.quantize(values(32, 32), "mxfp8")
    with pytest.raises(RuntimeError, match="was given a QuantizedTensor; it takes plain tensors"):
        compiler(lambda q: torch.ops.quire.quantize(q, "mxfp8", True, False))(q)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_and_make_them(spec, strict):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(quire.quantize(values(32, 64), spec), requires_grad=False)

        def forward(self, x):
            made = quire.quantize(x, spec)
            return torch.nn.functional.linear(made.dequantize(), self.weight.dequantize()), made.buffer_list()[0] + 1

    module = Module()
    with torch.no_grad():
        program = torch.export.export(module, (values(16, 64),), strict=strict)
        assert same(program.module()(values(16, 64)), module(values(16, 64)))
        assert {str(node.target) for node in program.graph.nodes} >= {"quire.quantize.default"}
