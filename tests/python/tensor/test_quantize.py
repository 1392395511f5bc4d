"""quire.quantize: arguments, seeds, and independence of how a tensor lies in memory."""

import pickle

import pytest
import torch

import quire
from steps import assert_rounded

pytestmark = pytest.mark.any_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bytes_of(q):
    return torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in q.buffers().values()])


def test_strides_do_not_matter():
    wide = torch.randn(64, 200)
    for view in (wide[:, 3:99], wide[::2], wide.t(), wide[:1].expand(7, 200), wide.reshape(4, 16, 200).transpose(0, 1)):
        for spec in ("fp8_tensor", "mxfp8", "nvfp4:rht"):
            direct, copied = (quire.quantize(v, spec, columnwise=True) for v in (view, view.contiguous()))
            assert torch.equal(bytes_of(direct), bytes_of(copied))


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_directions_in_one_pass_are_those_of_two_passes(dtype):
    x = torch.randn(33, 50).to(dtype)
    for spec in ("fp8_row", "fp8_block:pow2", "mxfp8:32x32", "nvfp4:rht"):
        both = quire.quantize(x, spec, columnwise=True)
        one, other = quire.quantize(x, spec), quire.quantize(x, spec, rowwise=False, columnwise=True)
        assert torch.equal(bytes_of(both), torch.cat([bytes_of(one), bytes_of(other)]))


def test_stochastic_rounding_needs_a_seed():
    with pytest.raises(ValueError, match="quantize: nvfp4:sr rounds stochastically and needs a seed; pass seed="):
        quire.quantize(torch.randn(16, 16), "nvfp4:sr")


def test_seed_and_offset_select_the_random_numbers():
    x = torch.randn(64, 64)
    keys = [(0, 0), (1, 0), (0, 1), (2**32, 0), (0, 2**32), (2**63, 0), (2**64 - 1, 2**64 - 1)]
    results = [bytes_of(quire.quantize(x, "nvfp4:sr", seed=seed, offset=offset)) for seed, offset in keys]
    assert not any(torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])
    again = bytes_of(quire.quantize(x, "nvfp4:sr", seed=-1, offset=-1))
    assert torch.equal(again, results[-1])  # the same 64 bits


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
@pytest.mark.parametrize("name", ["seed", "offset"])
def test_seeds_and_offsets_have_64_bits(name, value):
    with pytest.raises(ValueError, match=f"{name} must fit into 64 bits.*got {value}"):
        quire.quantize(torch.randn(16, 16), "nvfp4:sr", **{"seed": 0, name: value})


def test_a_given_scale_multiplies_before_the_cast_and_saturates():
    x = torch.tensor([[1.0, -2.0, 3.0, 1000.0]])
    q = quire.quantize(x, "fp8_tensor", scale=torch.tensor([4.0]))
    assert q.dequantize().tolist() == [[1.0, -2.0, 3.0, 112.0]]
    assert q.rowwise_scale.tolist() == [0.25] and q.rowwise_amax.tolist() == [1000.0]


@pytest.mark.parametrize("spec", ["fp8_tensor", "mxfp8", "nvfp4:rht"])
def test_a_gradient_passes_quantize_as_it_is(spec):
    x = torch.randn(16, 16, requires_grad=True)
    q = quire.quantize(x, spec)
    assert q.requires_grad and not q.detach().requires_grad
    assert torch.equal(q.dequantize(), quire.quantize(x.detach(), spec).dequantize())
    (q.dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((16, 16), 3.0))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("spec", ["fp8_tensor", "fp8_row", "fp8_block:128x128", "mxfp8", "mxfp8:32x32", "nvfp4"])
def test_a_tensor_without_dimensions_is_quantized_as_one_of_one_value(spec, compiled, compiler):
    x, other = torch.tensor(-1.3, dtype=torch.bfloat16), torch.tensor(0.4)
    function = compiler(quire.quantize) if compiled else quire.quantize
    q, one = function(x, spec, columnwise=True), quire.quantize(x.view(1), spec, columnwise=True)
    assert q.shape == () and q.dequantize().shape == () and q.proto.buffers() == one.proto.buffers()
    for copy in (q, q.clone(), q.view(1), pickle.loads(pickle.dumps(q)), one.view(()), one[0]):
        assert isinstance(copy, quire.QuantizedTensor) and torch.equal(copy.dequantize().view(1), one.dequantize())
    for direction in ("rowwise", "columnwise"):
        part = quire.quantize(x, spec, rowwise=direction == "rowwise", columnwise=direction == "columnwise")
        assert torch.equal(part.dequantize(), q.dequantize())
    empty = q.proto.create_tensor()
    q = empty.quantize_(other)
    again = quire.quantize(other.view(1), spec, columnwise=True)
    assert all(torch.equal(a, b) for a, b in zip(q.buffers().values(), again.buffers().values(), strict=True))
    leaf = other.clone().requires_grad_()
    y = function(leaf, spec)
    (y.dequantize() * 3).backward()
    assert y.shape == leaf.grad.shape == () and leaf.grad == 3 and y.detach().dequantize() == again.dequantize()
    if "fp8_row" in spec or spec in ("fp8_tensor", "nvfp4"):
        assert torch.equal(quire.amax(other, spec)[0], quire.amax(other.view(1), spec)[0])


def test_a_detached_tensor_has_the_buffers_of_the_tensor():
    q = quire.quantize(torch.randn(32, 32), "mxfp8", columnwise=True).requires_grad_()
    detached = q.detach()
    assert not detached.requires_grad and detached is not q
    assert all(one is other for one, other in zip(detached.get_data_tensors(), q.get_data_tensors(), strict=True))
    detached.zero_()
    assert not q.dequantize().any()


def test_a_gradient_of_codes_is_refused_in_words():
    results = torch.ops.quire.quantize(torch.randn(16, 16, requires_grad=True), "fp8_tensor", True, False)
    with pytest.raises(RuntimeError, match="quire::quantize has no gradient; use quire.Linear, or detach its input"):
        results[1].sum().backward()


REFUSED = [
    (torch.ones(4, 4, dtype=torch.int32), {}, "quantize: x must be float32, float16 or bfloat16, got Int; convert"),
    (torch.ones(4, 4, dtype=torch.uint8), {}, "quantize: x must be float32, float16 or bfloat16, got Byte"),
    (torch.ones(4, 4, dtype=torch.float64), {}, "got Double; convert it with .to"),
    (torch.ones(4, 4).to_sparse(), {}, "quantize: x must be a dense tensor, got one of layout Sparse; use .to_dense"),
    (torch.ones(4, 4), {"rowwise": False}, "quantize: rowwise and columnwise are both False; ask for at least one"),
    (torch.ones(4, 4), {"scale": torch.ones(1)}, "scale"),
    (torch.ones(4, 4), {"spec": "fp8_tensor", "scale": torch.ones(2)}, r"scale must be float32 of size \[1\]"),
]


@pytest.mark.cpu_only
@pytest.mark.parametrize("x, options, words", REFUSED)
def test_wrong_arguments_are_refused_in_words(x, options, words):
    with pytest.raises(RuntimeError, match=words):
        quire.quantize(x, options.pop("spec", "mxfp8"), **options)


X = torch.ones(4, 32)
WRONG_KINDS = {
    "a direction of text": (
        lambda: quire.quantize(X, "mxfp8", "yes"),
        TypeError,
        "quantize: rowwise must be a bool, got",
    ),
    "a direction of None": (
        lambda: quire.quantize(X, "mxfp8", columnwise=None),
        TypeError,
        "columnwise must be a bool",
    ),
    "an amax by a number": (lambda: quire.amax(X, "nvfp4", 2.0), TypeError, "amax: rowwise must be a bool, got 2.0"),
    "a number as amaxes": (lambda: quire.quantize(X, "nvfp4", amax=1.0), TypeError, "amax must be a pair .* got 1.0;"),
    "a tensor as amaxes": (lambda: quire.quantize(X, "nvfp4", amax=torch.ones(2)), TypeError, "amax must be a pair"),
    "an unknown family": (lambda: quire.quantize(X, "fp9"), ValueError, "^quantize: spec: unknown family in '>>fp9<<'"),
    "amaxes of one": (lambda: quire.amax(X, "fp9"), ValueError, "^amax: spec: unknown family in '>>fp9<<'"),
    "a tensor as spec": (lambda: quire.quantize(X, torch.ones(4096)), TypeError, "^quantize: spec: .* got Tensor;"),
    "text as a dtype": (
        lambda: quire.dequantize(quire.quantize(X, "mxfp8"), "float32"),
        TypeError,
        "dequantize: dtype must be a torch.dtype, got 'float32'",
    ),
    "text as a dtype of one with a gradient": (
        lambda: quire.dequantize(quire.quantize(X.clone().requires_grad_(), "mxfp8"), "float32"),
        TypeError,
        "dequantize: dtype must be a torch.dtype, got 'float32'",
    ),
    "an unknown device": (
        lambda: quire.functional.synchronize("nope"),
        RuntimeError,
        "^synchronize: device 'nope' is none",
    ),
    "half a device": (lambda: quire.functional.synchronize(1.5), TypeError, "^synchronize: device 1.5 is none"),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", WRONG_KINDS)
def test_an_argument_of_a_wrong_kind_is_refused_in_words(name):
    call, error, words = WRONG_KINDS[name]
    with pytest.raises(error, match=words):
        call()


WITH_AMAXES = ["fp8_tensor", "fp8_tensor:e5m2", "fp8_row", "nvfp4", "nvfp4:16x16", "nvfp4:rht", "nvfp4:row_scaled"]
WITH_AMAXES += ["nvfp4:global=mul"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("spec", WITH_AMAXES)
def test_amaxes_that_are_measured_apart_change_no_byte(spec, compiled):
    def in_two_steps(x):
        return quire.quantize(x, spec, columnwise=True, amax=quire.amax(x, spec, columnwise=True))

    x = torch.randn(33, 48) * 3
    function = torch.compile(in_two_steps, fullgraph=True, backend="aot_eager") if compiled else in_two_steps
    assert torch.equal(bytes_of(function(x)), bytes_of(quire.quantize(x, spec, columnwise=True)))


def test_amaxes_are_those_of_the_tensor_or_of_its_lines():
    x = torch.randn(5, 7, 64)
    whole, lines, rows = x.abs().amax().reshape(1), x.abs().amax(-1).flatten(), x.abs().amax((0, 1))
    for spec, rowwise, columnwise in (("fp8_tensor", whole, whole), ("fp8_row", lines, rows), ("nvfp4", whole, whole)):
        found = quire.amax(x, spec, columnwise=True)
        assert torch.equal(found[0], rowwise) and torch.equal(found[1], columnwise)
    assert quire.amax(x, "nvfp4")[1] is None


@pytest.mark.parametrize("spec", ["fp8_tensor", "fp8_row", "nvfp4"])
def test_parts_under_the_largest_amax_of_all_have_the_bytes_of_the_whole(spec):
    x = torch.randn(32, 64)
    parts = x.split(32, 1)
    amax = torch.stack([quire.amax(part, spec)[0] for part in parts]).amax(0)
    values = torch.cat([quire.quantize(part, spec, amax=(amax, None)).dequantize() for part in parts], 1)
    assert torch.equal(values, quire.quantize(x, spec).dequantize())


@pytest.mark.cpu_only
def test_amaxes_that_do_not_fit_are_refused():
    x, one = torch.randn(16, 32), torch.ones(1)
    with pytest.raises(RuntimeError, match="amax: scales of mxfp8 follow from blocks alone.*use fp8_tensor"):
        quire.amax(x, "mxfp8")
    with pytest.raises(RuntimeError, match="quantize: scales of mxfp8 follow from blocks alone"):
        quire.quantize(x, "mxfp8", amax=(torch.ones(0), None))
    with pytest.raises(RuntimeError, match=r"rowwise_amax of fp8_row must be what quire::amax returns.*\[16\], got"):
        quire.quantize(x, "fp8_row", amax=(one, None))
    with pytest.raises(RuntimeError, match="a scale and an amax are both given"):
        quire.quantize(x, "fp8_tensor", scale=one, amax=(one, None))
    with pytest.raises(RuntimeError, match="must not be negative or NaN; got nan"):
        quire.quantize(x, "nvfp4", amax=(one * float("nan"), None))


def test_nvfp4_decodes_to_infinity_where_its_scale_leaves_float32_and_multiplies_what_it_was():
    x = torch.zeros(1, 64)
    x[0, :32] = torch.tensor([7.6e35, 7.5e35]).repeat_interleave(16)
    q = quire.quantize(x, "nvfp4")
    assert q.rowwise_scale[0, :2].tolist() == [0x7E, 0x7E] and torch.finfo(torch.float32).max / 448 < 7.6e35
    assert q.dequantize().isinf()[0, :32].all() and q.dequantize()[0, 32:].eq(0).all()
    x[0, 1] = 0
    assert quire.quantize(x, "nvfp4").dequantize()[0, 1].isnan()
    y = torch.ops.quire.linear(x, torch.eye(64), None, "x=nvfp4,w=nvfp4,dy=nvfp4", torch.float32)
    exact = x[:, :1].double().repeat(1, 32)  # the blocks have one scale, and each of their numbers the largest code
    exact[0, 1] = 0
    assert_rounded(y[:, :32], exact, exact, 64 + 6)
    below = torch.full((1, 16), 7.5e35)
    torch.testing.assert_close(quire.quantize(below, "nvfp4").dequantize(), below)
