"""Writing to a QuantizedTensor: it is quantized anew, into the same storage, or refused."""

import copy
import pickle

import pytest
import torch

import quire
from quire import QuantizedTensor
from steps import same

pytestmark = pytest.mark.any_device

SPECS = ["fp8_tensor", "fp8_row", "fp8_block", "fp8_block:128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4:16x16"]
SPECS += ["nvfp4:row_scaled", "nvfp4:rht", "mxfp8:swizzled", "fp8_block:interleaved"]


@pytest.fixture(params=SPECS)
def spec(request):
    return request.param


def values(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(spec, *shape, device="cpu"):
    return quire.quantize(values(*shape).to(device), spec, columnwise=True)


def beside(t, *shape, seed=3):
    """Values on the device of t."""
    return values(*shape, seed=seed).to(t.device)


WRITES = {
    "add_": lambda t: t.add_(beside(t, 32, 48, seed=4), alpha=0.1),
    "mul_": lambda t: t.mul_(0.5),
    "addcdiv_": lambda t: t.addcdiv_(beside(t, 32, 48, seed=5), beside(t, 32, 48, seed=6).abs() + 1, value=-0.1),
    "zero_": lambda t: t.zero_(),
    "itself": lambda t: t.add_(t),
    "lerp_": lambda t: t.lerp_(beside(t, 32, 48, seed=4), 0.3),
    "copy_plain": lambda t: t.copy_(values(32, 48, seed=4)),
    "copy_broadcast": lambda t: t.copy_(values(48, seed=4)),
    "fill": lambda t: t.fill_(3.0),
    "operator": lambda t: t.__iadd__(1.0),
    "uniform_": lambda t: t.uniform_(-1, 1, generator=torch.Generator(t.device).manual_seed(0)),
    "index": lambda t: t.index_fill_(0, torch.tensor([1, 3], device=t.device), 2.0),
    "out": lambda t: torch.mul(beside(t, 32, 48), 2, out=t),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_computes_on_values_and_quantizes_them_into_the_same_storage(spec, write, device):
    q = quantized(spec, 32, 48, device=device)
    before = {name: t.data_ptr() for name, t in q.buffers().items()}
    expected = write(q.dequantize())
    result = write(q)
    assert result is q and {name: t.data_ptr() for name, t in q.buffers().items()} == before
    assert same(q, quire.quantize(expected.contiguous(), spec, columnwise=True))


def test_a_write_returns_the_tensor_in_inference_mode_too():
    with torch.inference_mode():
        q = quantized("mxfp8", 32, 48)
        assert q.add_(1) is q and torch.mul(q, 2, out=q) is q and torch.ops.aten.add_.Tensor(q, 1) is q


def test_lists_of_tensors_are_written_like_single_ones(spec, device):
    q, plain = quantized(spec, 32, 48, device=device), values(8, 8).to(device)
    expected = q.dequantize() * 0.5 + 1
    torch._foreach_mul_([q, plain], 0.5)
    half = quire.quantize(quantized(spec, 32, 48, device=device).dequantize() * 0.5, spec, columnwise=True)
    assert same(q, half) and torch.equal(plain.cpu(), values(8, 8) * 0.5)
    torch._foreach_add_([q], [torch.ones(32, 48, device=device)])
    assert same(q, quire.quantize(half.dequantize() + 1, spec, columnwise=True)) and expected.shape == q.shape


def test_setting_items_writes_them(spec, device):
    q = quantized(spec, 32, 48, device=device)
    dense = q.dequantize()
    q[0, :5] = 2.0
    dense[0, :5] = 2.0
    assert same(q, quire.quantize(dense, spec, columnwise=True))


def test_codes_are_copied_between_tensors_of_one_spec(spec, device):
    source = quire.quantize(values(32, 48, seed=9).to(device), spec, columnwise=True)
    q = quantized(spec, 32, 48, device=device)
    assert q.copy_(source) is q and same(q, source) and q.rowwise_data is not source.rowwise_data
    source.update_usage(columnwise_usage=False)
    q = quantized(spec, 32, 48, device=device).copy_(source)
    assert torch.equal(q.rowwise_data, source.rowwise_data)
    source.update_usage(columnwise_usage=True, requantize=True)
    assert same(q, source)


def test_copies_between_specs_and_to_plain_tensors(spec, device):
    q = quantized(spec, 32, 48, device=device)
    other = quantized("mxfp8:e5m2", 32, 48, device=device).copy_(q)
    assert same(other, quire.quantize(q.dequantize(), "mxfp8:e5m2", columnwise=True))
    plain = torch.zeros(32, 48, dtype=torch.float16, device=device)
    assert plain.copy_(q) is plain and torch.equal(plain, q.dequantize().half())
    plain = torch.ones(32, 48, device=device).add_(q)
    assert type(plain) is torch.Tensor and torch.equal(plain, q.dequantize() + 1)


def test_quantize_in_place(spec, device):
    q = quantized(spec, 32, 48, device=device)
    pointer = q.rowwise_data.data_ptr()
    assert q.quantize_(values(32, 48, seed=7).bfloat16().to(device)) is q and q.rowwise_data.data_ptr() == pointer
    assert same(q, quire.quantize(values(32, 48, seed=7).bfloat16(), spec, columnwise=True))
    with pytest.raises(ValueError, match=r"values must have shape \[32, 48\], got \[48\]"):
        q.quantize_(values(48))


FLAGS = {"set": 1.0, "not set": 0.0}
#: Scales that a tensor has, and that a write with a flag is given.
GIVEN = [(None, None), (None, 3.0), (2.0, None), (2.0, 3.0)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("has, gets", GIVEN)
def test_a_flag_decides_under_which_scale_later_writes_are(has, gets, flag, compiled, compiler, device):
    if compiled and has is None and gets is not None:
        pytest.skip("PyTorch does not compile functions that give an input an attribute")

    def scale(number):
        return None if number is None else torch.full((1,), number, device=device)

    def write(q, x, flag, scale):
        q.quantize_(x, noop_flag=flag, scale=scale)

    x = values(32, 48).to(device)
    q = quire.quantize(x, "fp8_tensor", columnwise=True, scale=scale(has))
    (compiler(write) if compiled else write)(q, 100 * x, torch.full((1,), flag, device=device), scale(gets))
    kept = scale(has if flag else gets)
    assert same(
        q.buffers(), quire.quantize(x if flag else 100 * x, "fp8_tensor", columnwise=True, scale=kept).buffers()
    )
    q = pickle.loads(pickle.dumps(q.clone()))
    q.copy_(7 * x)
    assert same(q.buffers(), quire.quantize(7 * x, "fp8_tensor", columnwise=True, scale=kept).buffers())


def test_a_flag_keeps_all_of_the_tensor_that_a_part_is_written_in(device):
    for spec, part in (("fp8_tensor", lambda q: q[:, :8]), ("mxfp8", lambda q: q[:16])):
        q = quantized(spec, 32, 48, device=device)
        before = q.clone()
        part(q).quantize_(100 * part(beside(q, 32, 48)), noop_flag=torch.ones(1, device=device))
        assert same(q, before)


WRONG_WRITES = {
    "a flag without values": (
        {"noop_flag": torch.ones(1, device="meta")},
        ValueError,
        "device of the tensor, cpu, or on the CPU, got",
    ),
    "a complex flag": (
        {"noop_flag": torch.ones(1) * 1j},
        TypeError,
        "noop_flag must be a real number, got torch.compl",
    ),
    "a sparse flag": ({"noop_flag": torch.ones(1).to_sparse()}, TypeError, "noop_flag must be a dense tensor"),
    "another option": (
        {"sed": 1},
        TypeError,
        r"there is no option 'sed'; .* seed, offset, scale; did you mean 'seed'\?",
    ),
    "a number as scale": ({"scale": 2.0}, TypeError, "scale must be a tensor, got 2.0"),
    "scales of another number": ({"scale": torch.ones(4)}, RuntimeError, r"scale must be float32"),
    "a seed beyond 64 bits": ({"seed": 2**64}, ValueError, "seed must fit into 64 bits"),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", WRONG_WRITES)
def test_a_write_that_is_refused_changes_nothing(name, stacked):
    options, error, words = WRONG_WRITES[name]
    q = quantized("fp8_tensor", 32, 48)
    q = quire.QuantizedStack.of([q, q, q]) if stacked else q
    before = q.clone()
    with pytest.raises(error, match=words):
        q.quantize_(torch.full(q.shape, 100.0), **options)
    assert same(q, before)


def test_stochastic_rounding_in_place_needs_a_seed(device):
    q = quire.quantize(values(32, 48).to(device), "nvfp4:sr", seed=1, columnwise=True)
    before = q.clone()
    with pytest.raises(ValueError, match=r"nvfp4:sr rounds stochastically and needs a seed; use quantize_"):
        q.add_(1)
    plain = values(8, 8).to(device)
    with pytest.raises(ValueError, match="needs a seed"):
        torch._foreach_mul_([plain, q], 2)
    assert same(q, before) and torch.equal(plain.cpu(), values(8, 8))
    q.copy_(before)
    q.quantize_(values(32, 48, seed=2).to(device), seed=5, offset=7)
    assert same(q, quire.quantize(values(32, 48, seed=2), "nvfp4:sr", columnwise=True, seed=5, offset=7))


def test_a_failing_write_changes_nothing():
    q = quantized("nvfp4", 32, 48)
    before = q.clone()
    with pytest.raises(RuntimeError, match=r"shape \[32, 48\] the shape \[48, 32\] and .*; it keeps its shape"):
        q.t_()
    with pytest.raises(RuntimeError, match="it keeps its shape"):
        q.resize_(2, 2)
    for write in (lambda: q.copy_(values(3, 3)), lambda: q.add_(values(7)), lambda: q.quantize_(values(2))):
        with pytest.raises((RuntimeError, ValueError)):
            write()
    assert same(q, before)


@pytest.mark.cpu_only
def test_data_takes_over_another_tensors_buffers():
    q, other = quantized("mxfp8", 32, 48), quire.quantize(values(32, 48, seed=8), "nvfp4")
    q.data.copy_(values(32, 48, seed=5))
    assert same(q, quire.quantize(values(32, 48, seed=5), "mxfp8", columnwise=True))
    q.data = other
    assert q.spec == other.spec and q.rowwise_data is other.rowwise_data and q.columnwise_data is None
    q.data = values(32, 48)
    assert same(q, quire.quantize(values(32, 48), "nvfp4"))
    for wrong in (values(32, 48).double(), values(48, 32), values(32, 48).to("meta")):
        with pytest.raises(
            TypeError, match=r"expected a QuantizedTensor of shape \[32, 48\] on cpu, or values in .*got Tensor"
        ):
            q.data = wrong


def test_a_master_takes_the_updates(device):
    q = quantized("nvfp4:16x16", 32, 48, device=device)
    q.master = values(32, 48).to(device)
    for _ in range(3):
        q.add_(1e-4)
    expected = values(32, 48) + 1e-4 + 1e-4 + 1e-4
    assert torch.equal(q.master.cpu(), expected) and same(q, quire.quantize(expected, "nvfp4:16x16", columnwise=True))
    assert isinstance(q.clone(), QuantizedTensor) and torch.equal(q.clone().master.cpu(), expected)
    q.copy_(values(32, 48, seed=4))
    assert torch.equal(q.master.cpu(), values(32, 48, seed=4))
    plain = quantized("nvfp4:16x16", 32, 48, device=device)
    q.copy_(plain)
    assert same(q, plain) and torch.equal(q.master, plain.dequantize())


def test_versions_count_writes():
    q = quantized("mxfp8", 32, 32)
    version = q._version
    q.add_(1)
    assert q._version > version


#: What comes before a write, of a tensor that was given a scale.
BEFORE = {
    "nothing": lambda q: q,
    "clone": lambda q: q.clone(),
    "empty_like": torch.empty_like,
    "view": lambda q: q.view(2, 16, 48).view(32, 48),
    "half": lambda q: q.half().float(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "write": lambda q: q.mul_(2),
    "codes of another": lambda q: q.copy_(quantized("fp8_tensor", 32, 48, device=q.device)),
    "quantize_": lambda q: quantized("fp8_tensor", 32, 48, device=q.device).quantize_(
        beside(q, 32, 48), scale=torch.tensor([3.7], device=q.device)
    ),
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("write", [lambda q, x: q.copy_(x), lambda q, x: torch._foreach_copy_([q], [x])])
def test_a_write_does_not_take_another_scale_than_the_given_one(before, write, device):
    scale = torch.tensor([3.7], device=device)
    q = before(quire.quantize(values(32, 48).to(device), "fp8_tensor", columnwise=True, scale=scale))
    scale.fill_(9)
    with torch.no_grad():
        write(q, beside(q, 32, 48, seed=8))
    expected = quire.quantize(values(32, 48, seed=8), "fp8_tensor", columnwise=True, scale=torch.tensor([3.7]))
    assert same(q, expected)
    with torch.no_grad():
        q.quantize_(beside(q, 32, 48))
    assert same(q, quire.quantize(values(32, 48), "fp8_tensor", columnwise=True)), "of its own amax, as it asks for"


def test_a_stack_does_not_take_other_scales_than_the_given_ones(device):
    stack = quire.QuantizedStack.of([quantized("fp8_tensor", 32, 48, device=device)] * 2)
    scale = torch.tensor([3.7, 0.3])
    stack.quantize_(beside(stack, 2, 32, 48), scale=scale.to(device))
    for _ in range(2):
        stack.copy_(beside(stack, 2, 32, 48, seed=8))
        for part, x, one in zip(stack.unbind(), values(2, 32, 48, seed=8), scale.split(1), strict=True):
            assert same(part, quire.quantize(x, "fp8_tensor", columnwise=True, scale=one))
        stack = stack.clone()


def test_a_compiled_write_does_not_take_another_scale_than_the_given_one(compiler):
    q = quire.quantize(values(32, 48), "fp8_tensor", scale=torch.tensor([3.7]))
    compiler(lambda q, x: q.copy_(x))(q, values(32, 48, seed=8))
    assert same(q, quire.quantize(values(32, 48, seed=8), "fp8_tensor", scale=torch.tensor([3.7])))
    made = compiler(lambda x, s: quire.quantize(x, "fp8_tensor", scale=s))(values(32, 48), torch.tensor([3.7]))
    made.copy_(values(32, 48, seed=8))
    assert same(made, q)


def test_a_copy_of_rows_is_quantized_anew_as_a_tensor_of_its_own(device):
    q = quantized("mxfp8", 64, 48, device=device)
    before, part = q.clone(), q[:32].clone()
    part.quantize_(beside(q, 32, 48, seed=8))
    assert same(part, quire.quantize(values(32, 48, seed=8), "mxfp8")) and same(q, before)


@pytest.mark.parametrize("flag", [None, *FLAGS.values()])
def test_a_stack_that_has_scales_takes_values_without(flag, device):
    x = values(3, 32, 48).to(device)
    scale = torch.full((1,), 2.0, device=device)
    stack = quire.QuantizedStack.of([quire.quantize(one, "fp8_tensor", scale=scale) for one in x])
    before = stack.clone()
    stack.quantize_(100 * x, noop_flag=None if flag is None else torch.full((1,), flag, device=device))
    expected = quire.QuantizedStack.of([quire.quantize(100 * one, "fp8_tensor") for one in x])
    assert same(stack.buffers(), (before if flag else expected).buffers())
