"""Views of a QuantizedTensor: they are read as it is now, and what is written to one is written to it."""

import copy
import pickle

import numpy as np
import pytest
import torch

import quire
from quire import QuantizedStack, QuantizedTensor
from quire.tensor.decoded import DecodedView
from steps import same

SPECS = ["fp8_tensor", "fp8_row", "fp8_block", "fp8_block:128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4:16x16"]
SPECS += ["nvfp4:row_scaled", "nvfp4:rht", "mxfp8:swizzled", "fp8_block:interleaved"]
ROWS, COLUMNS = 256, 144


def values(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(t):
    return t.dequantize() if isinstance(t, QuantizedTensor) else t + 0


WRITES = {
    "a row": lambda w: w[0].zero_(),
    "rows": lambda w: w[2:5].mul_(2),
    "init": lambda w: torch.nn.init.zeros_(w[:40]),
    "diagonal": lambda w: w.fill_diagonal_(0),
    "a view of the diagonal": lambda w: w.diagonal().zero_(),
    "a row of the transpose": lambda w: w.t()[0].zero_(),
    "all of the transpose": lambda w: w.T.mul_(2),
    "flat": lambda w: w.view(-1)[:9].fill_(1),
    "columns": lambda w: w[:, 3:7].add_(1),
    "a chunk": lambda w: w.chunk(3)[1].mul_(3),
    "a row of rows": lambda w: w[0:128].view(2, 64, -1)[1].zero_(),
    "with a new dimension": lambda w: w[0][None].mul_(3),
    "data": lambda w: w[1].detach().data.zero_(),
    "an item": lambda w: w.__setitem__(0, 0),
    "an item of a row": lambda w: w[7].__setitem__(3, 5.0),
    "a mask": lambda w: w.__setitem__(torch.ones(ROWS, COLUMNS, device=w.device).triu() > 0, 1.0),
    "indices": lambda w: w[0].index_fill_(0, torch.tensor([1, 5], device=w.device), 2.0),
    "foreach": lambda w: torch._foreach_mul_([w[0], w[1], w.t()[3]], 2),
    "aliases": lambda w: torch._foreach_mul_([w.detach()[:128], w.view(2, 128, COLUMNS)[1], w.data.t()[3]], 2),
    "out": lambda w: torch.mul(w[0], 3, out=w[1]),
    "a copy within": lambda w: w[3].copy_(w[4]),
    "a square and its transpose": lambda w: w[:64, :64].t().add_(w[:64, 64:128]),
    "strides": lambda w: w.as_strided((3, 5), (7, 2), 11).fill_(0.5),
    "uniform": lambda w: w[9:11].uniform_(-1, 1, generator=torch.Generator(w.device).manual_seed(0)),
}
VIEWS = [lambda t: t[8:16], lambda t: t[:, 2:9], lambda t: t[128:256].view(4, 32, COLUMNS), lambda t: t.t()[5:]]


#: Each write under some of the specs, and each spec for some of the writes.
PAIRS = [(write, spec) for i, write in enumerate(WRITES) for spec in SPECS[i % 4 :: 4]]


@pytest.mark.parametrize(("write", "spec"), PAIRS)
@pytest.mark.parametrize("master", [False, True], ids=["codes", "master"])
def test_a_write_to_a_view_is_one_to_the_tensor(write, master, spec):
    """By the contract all of the tensor is quantized again; a master keeps every other value bit for bit. (The test
    device cannot write to plain tensors with strides.)"""
    x = values(ROWS, COLUMNS)
    q = quire.quantize(x.bfloat16(), spec, columnwise=True)
    if master:
        q.master = x.clone()
    exact = x.clone() if master else q.dequantize()
    views = [view(q) for view in VIEWS]
    read = [plain(view).clone() for view in views]
    with torch.no_grad():
        WRITES[write](q)
        WRITES[write](exact)
    assert same(q, quire.quantize(exact, spec, columnwise=True))
    assert not master or torch.equal(q.master, exact)
    codes = q.dequantize()
    now = exact.to(q.dtype) if master else codes
    for view, of, before in zip(views, VIEWS, read, strict=True):
        expected = of(codes if isinstance(view, QuantizedTensor) else now)
        assert torch.equal(plain(view), expected) and before.shape == view.shape


def test_a_view_of_a_stack_writes_to_its_matrices():
    parts = [quire.quantize(values(48, 96, seed=i), "nvfp4:16x16", columnwise=True) for i in range(3)]
    stack, exact = QuantizedStack.of(parts), torch.stack([part.dequantize() for part in parts])
    for t in (stack, exact):
        t[:, :16].mul_(2)
    assert all(
        same(part, quire.quantize(x, "nvfp4:16x16", columnwise=True)) for part, x in zip(stack, exact, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_a_matrix_of_a_stack_are_those_of_its_own_master(dtype):
    with quire.quantized_model_init(recipe="mxfp8", keep_master=True):
        layer = quire.GroupedLinear(3, COLUMNS, 64, bias=False, single_grouped_weight=True, params_dtype=dtype)
    stack = layer.weight.detach()
    exact = stack.master.clone()
    for i in range(3):
        for view in (lambda t: t.t(), lambda t: t[:, 3:7], lambda t: t.view(-1)):
            assert torch.equal(view(stack[i]) + 0, view(exact[i]).to(dtype))
    assert torch.equal(stack[1:].transpose(1, 2) + 0, exact[1:].transpose(1, 2).to(dtype))
    stack[2].view(-1)[:5].fill_(7.0)
    exact[2].view(-1)[:5].fill_(7.0)
    assert torch.equal(stack.master, exact)
    assert same(stack[2], quire.quantize(exact[2], stack.spec_text, columnwise=True))


MATMULS = {
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "linear": torch.nn.functional.linear,
    "einsum": lambda x, w: torch.einsum("tk,nk->tn", x, w),
    "inner": torch.inner,
    "out": lambda x, w: torch.mm(x, w.t(), out=torch.empty(len(x), len(w))),
    "addmm_": lambda x, w: torch.zeros(len(x), len(w)).addmm_(x, w.t()),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("multiply", MATMULS.values(), ids=MATMULS)
def test_matmuls_decode_the_codes_beside_a_master(multiply, guard):
    q = quire.quantize(values(64, 96), "nvfp4:16x16", columnwise=True)
    x, q.master = values(8, 96, seed=1), values(64, 96)
    with guard():
        y = multiply(x, q)
    torch.testing.assert_close(y, x @ q.dequantize().t())  # masters differ by much more than sums


RETURNING = {
    "unsafe_chunk": lambda t: torch.unsafe_chunk(t, 2)[0],
    "_unsafe_view": lambda t: torch.ops.aten._unsafe_view(t, [-1]),
    "lift": lambda t: torch.ops.aten.lift(t),
    "dropout": lambda t: torch.nn.functional.dropout(t, 0.5, training=False),
    "expand": lambda t: t.expand(2, *t.shape),
    "type_as": lambda t: t.t().type_as(torch.ones(1)),
    "to_dense": lambda t: t.to_dense(),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", RETURNING.values(), ids=RETURNING)
def test_no_result_is_the_memory_of_a_master(function, guard):
    with guard():
        q = quire.quantize(values(64, 96), "mxfp8", columnwise=True)
        q.master = values(64, 96)
        result = function(q)
        kinds = (QuantizedTensor, quire.tensor.decoded.DecodedView)
        assert isinstance(result, kinds) or result.untyped_storage().data_ptr() != q.master.data_ptr()


COMPILED = ["a row", "rows", "a row of the transpose", "flat", "an item", "a copy within", "out"]


@pytest.mark.parametrize("master", [False, True], ids=["codes", "master"])
@pytest.mark.parametrize("write", COMPILED)
def test_a_compiled_write_to_a_view_is_that_of_eager(write, master, compiler):
    def function(w):
        WRITES[write](w)
        return w.sum()

    x = values(ROWS, COLUMNS)
    eager, compiled = (quire.quantize(x, "nvfp4:16x16", columnwise=True) for _ in range(2))
    if master:
        eager.master, compiled.master = x.clone(), x.clone()
    with torch.no_grad():
        assert torch.equal(function(eager), compiler(function)(compiled)) and same(eager, compiled)
        assert not master or torch.equal(eager.master, compiled.master)


def test_a_view_that_a_graph_returns_is_written_through(compiler):
    q = quire.quantize(values(64, 32), "nvfp4:16x16", columnwise=True)
    transposed, rows, shaped = compiler(lambda w: (w.t(), w[16:32], w.view(2, 32, 32)))(q)
    transposed[5].zero_()
    shaped.mul_(2)
    assert not q[:, 5].any() and torch.equal(rows.dequantize(), q.dequantize()[16:32])


def test_a_view_is_an_input_of_a_graph(compiler):
    q = quire.quantize(values(64, 32), "nvfp4:16x16")
    assert torch.equal(compiler(lambda v: v * 2 + v.t().sum())(q.t()), q.dequantize().t() * 2 + q.dequantize().sum())


COPIES = {
    "clone": lambda t: t.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "double": lambda t: t.double().float(),
    "arithmetic": lambda t: t + 0,
    "numpy": lambda t: torch.tensor(t.numpy()),
    "asarray": lambda t: torch.tensor(np.asarray(t)),
    "tolist": lambda t: torch.tensor(t.tolist()),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies_of_a_decoded_view_are_plain(make):
    q = quire.quantize(values(64, 32), "nvfp4:16x16")
    view = q.t()
    made = make(view)
    assert type(view) is DecodedView and type(made) is torch.Tensor and torch.equal(made, q.dequantize().t())
    made.zero_()
    assert view.any() and "of=QuantizedTensor('nvfp4:16x16', shape=[64, 32]" in repr(view)


def test_what_would_need_memory_is_refused():
    q = quire.quantize(values(64, 32), "nvfp4:16x16")
    refused = [lambda v: v.data_ptr(), lambda v: v.share_memory_(), lambda v: v.apply_(abs), torch.from_dlpack]
    for call in refused:
        with pytest.raises(TypeError, match=r"this is a view of a QuantizedTensor \(nvfp4:16x16, shape \[64, 32\]\)"):
            call(q.t())
    with pytest.raises(ValueError, match="read-only"):
        q.t().numpy()[0] = 1


@pytest.mark.parametrize(
    "change", [lambda v: v.t_(), lambda v: v.resize_(2), lambda v: v.set_(torch.zeros(v.shape)), lambda v: v.squeeze_()]
)
def test_a_view_keeps_its_place(change):
    q = quire.quantize(values(32, 32), "mxfp8", columnwise=True)
    before = q.clone()
    for view in (q.t()[:, None], q[None, :8], q.t()):
        try:
            change(view)
        except RuntimeError as error:
            assert "it keeps its shape" in str(error) or "t_() expects a tensor with <= 2" in str(error)
        assert same(q, before)


@pytest.mark.parametrize("refused", [lambda q: q.unsqueeze_(0), lambda q: torch.add(torch.ones(3, 3), 1, out=q)])
def test_a_refused_change_of_form_leaves_the_master(refused):
    q = quire.quantize(values(32, 32), "mxfp8", columnwise=True)
    q.master = values(32, 32)
    before = q.clone()
    with pytest.raises(RuntimeError, match="it keeps its shape"):
        refused(q)
    assert same(q, before) and q.master.shape == (32, 32) and torch.equal(q.master, values(32, 32))
    q.t_()
    assert torch.equal(q.master, values(32, 32).t())


def test_a_copy_of_a_parameter_that_is_a_view_is_a_parameter():
    layer = torch.nn.Linear(32, 16)
    layer.weight = torch.nn.Parameter(quire.quantize(values(64, 32), "mxfp8")[:16])
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(again.weight, torch.nn.Parameter) and isinstance(again.weight, QuantizedTensor)
        assert torch.equal(again.weight.dequantize(), layer.weight.dequantize())
        again.weight.data.zero_()
        assert layer.weight.dequantize().any()


def test_gradients_pass_through_views():
    w, x = torch.nn.Parameter(quire.quantize(values(64, 32), "mxfp8", columnwise=True)), values(5, 32, seed=4)
    plain, y = w.dequantize().detach().requires_grad_(), x.clone().requires_grad_()
    (y @ w.t()).square().sum().backward()
    expected = x.clone().requires_grad_()
    (expected @ plain.t()).square().sum().backward()
    assert torch.equal(w.grad, plain.grad) and torch.equal(y.grad, expected.grad)
    kept = (y @ w.t()).square().sum()
    with torch.no_grad():
        w[0].zero_()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        kept.backward()
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        w.t()[0].zero_()


INFERENCE = ["a row", "a row of the transpose", "flat", "data", "an item", "foreach"]


@pytest.mark.parametrize("of_inference", [False, True])
@pytest.mark.parametrize("write", INFERENCE)
def test_a_write_to_a_view_in_inference_mode(write, of_inference):
    with torch.inference_mode(of_inference):
        q = quire.quantize(values(ROWS, COLUMNS), "nvfp4:16x16", columnwise=True)
        exact = q.dequantize()
    with torch.inference_mode():
        views = [view(q) for view in VIEWS]
        for t in (q, exact):
            WRITES[write](t)
        assert same(q, quire.quantize(exact, "nvfp4:16x16", columnwise=True))
        assert all(torch.equal(plain(view), of(q.dequantize())) for view, of in zip(views, VIEWS, strict=True))


def test_an_optimizer_of_a_view_updates_the_tensor():
    for make in (torch.optim.SGD, lambda p, lr: torch.optim.AdamW(p, lr, fused=True), torch.optim.Adam):
        q = quire.quantize(values(64, 32), "fp8_tensor", columnwise=True)
        q.master = values(64, 32)
        view = torch.nn.Parameter(q.t())
        expected = torch.nn.Parameter(values(64, 32).t())
        for parameter in (view, expected):
            parameter.grad = values(32, 64, seed=9)
            make([parameter], lr=0.1).step()
        assert same(q.master, expected.detach().t())
        assert same(q, quire.quantize(q.master, "fp8_tensor", columnwise=True))
