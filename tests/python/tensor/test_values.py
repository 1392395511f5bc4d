"""QuantSpec, TensorProto and QuantizedTensor as values."""

import copy
import pickle

import pytest
import torch

import quire
from python.tensor.tensor_specs import SPECS
from quire import QuantizedTensor, QuantSpec, TensorProto

SHAPES = [(33, 50), (2, 3, 64), (64,), (0, 32), (128, 0), (1, 1)]
DIRECTIONS = [(True, False), (False, True), (True, True)]


@pytest.fixture(params=SPECS)
def spec(request):
    return request.param


def test_a_spec_is_its_canonical_text():
    spec = QuantSpec("nvfp4:sr:rht")
    assert spec.text == str(spec) == "nvfp4:rht:sr" and repr(spec) == "QuantSpec('nvfp4:rht:sr')"
    assert spec == QuantSpec("nvfp4:rht:sr") == QuantSpec(spec) and hash(spec) == hash(QuantSpec(spec))
    assert spec != QuantSpec("nvfp4:rht")
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    with pytest.raises(AttributeError):
        spec.text = "mxfp8"


def test_a_spec_tells_its_parts():
    spec = QuantSpec("nvfp4:rht=unsigned:sr")
    assert (spec.family, spec.options, spec.stochastic, spec.hadamard) == ("nvfp4", ("rht=unsigned", "sr"), True, True)
    spec = QuantSpec("fp8_tensor")
    assert (spec.family, spec.options, spec.stochastic, spec.hadamard) == ("fp8_tensor", (), False, False)


@pytest.mark.parametrize(
    "text, words",
    [
        ("mxfp9", "unknown family in '>>mxfp9<<'; use one of fp8_tensor, "),
        ("nvfp4:32x32", "unknown option in 'nvfp4:>>32x32<<'; nvfp4 takes: 16x16, "),
        ("mxfp8:e5m2:e5m2", "given twice"),
        ("nvfp4:rht:16x16", "leave one of them out"),
        ("", "unknown family"),
    ],
)
def test_a_wrong_text_is_refused_and_the_wrong_part_marked(text, words):
    with pytest.raises(ValueError, match=words):
        QuantSpec(text)


def test_a_spec_is_made_of_text_only():
    with pytest.raises(TypeError, match="expected a text such as 'nvfp4:rht:sr', got 4"):
        QuantSpec(4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rowwise, columnwise", DIRECTIONS)
def test_a_proto_describes_what_quantize_and_create_tensor_store(spec, shape, rowwise, columnwise):
    proto = TensorProto(shape, torch.bfloat16, spec, rowwise=rowwise, columnwise=columnwise)
    x = torch.randn(shape).bfloat16()
    for q in (quire.quantize(x, spec, rowwise=rowwise, columnwise=columnwise), proto.create_tensor()):
        stored = {name: (tuple(t.shape), t.dtype) for name, t in q.buffers().items()}
        assert stored == proto.buffers() and q.proto == proto
        assert (q.spec, q.shape, q.dtype, q.device) == (QuantSpec(spec), shape, torch.bfloat16, torch.device("cpu"))
        assert q.nbytes == sum(t.nbytes for t in q.buffers().values())


def test_a_proto_of_the_contract():
    proto = TensorProto([4, 30, 40], torch.float32, "nvfp4:rht", columnwise=True)
    assert proto.buffers() == {
        "rowwise_data": ((4, 30, 20), torch.uint8),
        "rowwise_scale": ((120, 3), torch.uint8),
        "rowwise_amax": ((1,), torch.float32),
        "columnwise_data": ((40, 64), torch.uint8),
        "columnwise_scale": ((40, 8), torch.uint8),
        "columnwise_amax": ((1,), torch.float32),
    }


def test_a_proto_changes_directions_by_making_another():
    proto = TensorProto((4, 4), torch.float32, "mxfp8")
    both = proto.update_usage(columnwise_usage=True)
    assert (both.rowwise, both.columnwise, proto.columnwise) == (True, True, False)
    assert list(both.update_usage(rowwise_usage=False).buffers()) == ["columnwise_data", "columnwise_scale"]
    assert proto.update_usage() == proto
    with pytest.raises(ValueError, match="rowwise and columnwise are both False"):
        proto.update_usage(rowwise_usage=False)


def test_a_proto_on_another_device_and_with_a_gradient():
    proto = TensorProto((4, 4), torch.float32, "mxfp8", device="meta")
    assert proto.create_tensor().device.type == "meta" and proto.device == torch.device("meta")
    wanting = TensorProto((4, 4), torch.float32, "mxfp8", requires_grad=True)
    assert wanting.create_tensor().requires_grad and wanting.create_tensor().proto == wanting
    assert not proto.create_tensor().requires_grad


def tolerance(text):
    return 0.15 if "fp4" in text else 0.08 if "e5m2" in text else 0.05


def relative_error(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_comes_near_and_has_the_dtype_asked_for(spec, dtype):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    q = quire.quantize(x, spec)
    y = q.dequantize(dtype)
    assert y.dtype == dtype and y.shape == x.shape
    assert relative_error(y.float(), x) < tolerance(spec)
    assert torch.equal(quire.dequantize(q, dtype), y) and q.dequantize().dtype == torch.float32


@pytest.mark.parametrize("text", [s for s in SPECS if "rht" not in s])
@pytest.mark.parametrize("shape", [(33, 50), (2, 3, 64), (64,), (0, 32)], ids=str)
def test_columnwise_codes_dequantize_to_the_logical_orientation(text, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    q = quire.quantize(x, text, rowwise=False, columnwise=True)
    y = q.dequantize()
    assert y.shape == x.shape and (x.numel() == 0 or relative_error(y, x) < tolerance(text))


def test_columnwise_codes_of_a_transformed_tensor_are_not_the_tensor():
    q = quire.quantize(torch.randn(32, 32), "nvfp4:rht", rowwise=False, columnwise=True)
    with pytest.raises(ValueError, match="hold the Hadamard transform.*quantize with rowwise=True"):
        q.dequantize()
    assert quire.quantize(torch.randn(32, 32), "nvfp4:rht", columnwise=True).dequantize().shape == (32, 32)


def test_a_quantized_tensor_goes_through_its_buffers(spec):
    q = quire.quantize(torch.randn(33, 50), spec, columnwise=True)
    again = QuantizedTensor.from_buffers(q.buffers(), spec, (33, 50))
    assert torch.equal(again.dequantize(), q.dequantize()) and again.rowwise_data is q.rowwise_data
    assert QuantizedTensor.from_buffers(vars_of(q), spec, (33, 50)).proto == q.proto


def vars_of(q):
    """All six names, None where absent."""
    return {name: getattr(q, name) for name in quire.tensor.BUFFER_NAMES}


def to_cpu(q):
    return q.to("cpu")


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q)), to_cpu])
def test_a_quantized_tensor_can_be_copied(make_copy):
    q = quire.quantize(torch.randn(32, 32), "nvfp4", columnwise=True)
    other = make_copy(q)
    assert (other is not q or make_copy is to_cpu) and other.proto == q.proto
    assert all(torch.equal(a, b) for a, b in zip(q.buffers().values(), other.buffers().values(), strict=True))
    assert q.to("meta").rowwise_data.is_meta


def test_a_quantized_tensor_says_what_it_is():
    q = quire.quantize(torch.randn(32, 32), "mxfp8", columnwise=True)
    words = (
        "QuantizedTensor('mxfp8', shape=[32, 32], dtype=torch.float32, rowwise + columnwise, 2112 bytes, device='cpu')"
    )
    assert repr(q) == words


WRONG_PROTOS = {
    "a size below 0": ({"shape": (-1, 64)}, ValueError, r"sizes must be at least 0, got the shape \[-1, 64\]"),
    "a flag as size": ({"shape": (True, 2)}, ValueError, r"shape must be a sequence of sizes, got \(True, 2\)"),
    "text for a direction": ({"rowwise": "a"}, TypeError, "rowwise must be a bool, got 'a'"),
    "text for a gradient": ({"requires_grad": "x"}, TypeError, "requires_grad must be a bool, got 'x'"),
    "no device": ({"device": None}, TypeError, "device must be one that PyTorch knows, got None"),
    "an unknown device": ({"device": "nope"}, ValueError, "device must be one that PyTorch knows, got 'nope'"),
    "a tensor as spec": ({"spec": torch.ones(4096)}, TypeError, "spec: expected a text such as .*, got Tensor;"),
    "an unknown family": ({"spec": "mxfp9"}, ValueError, "spec: unknown family in '>>mxfp9<<'"),
}


@pytest.mark.parametrize("name", WRONG_PROTOS)
def test_a_proto_of_wrong_arguments_is_refused_in_words(name):
    wrong, error, words = WRONG_PROTOS[name]
    with pytest.raises(error, match=f"^TensorProto: {words}"):
        TensorProto(**{"shape": (4, 64), "dtype": torch.float32, "spec": "mxfp8", **wrong})


BROKEN = [
    (lambda b: b.pop("rowwise_scale"), "rowwise_scale of nvfp4 .* is missing; the buffers are rowwise_data, "),
    (lambda b: b.update(colour=b["rowwise_data"]), "colour of nvfp4 .* should be absent"),
    (lambda b: b.update(columnwise_scale=b["rowwise_scale"]), "columnwise_scale .* should be absent"),
    (lambda b: b.update(rowwise_data=b["rowwise_data"].char()), r"torch.uint8 \[32, 16\], got torch.int8 \[32, 16\]"),
    (lambda b: b.update(rowwise_data=b["rowwise_data"][:, 1:]), r"got torch.uint8 \[32, 15\] \(not contiguous\)"),
    (lambda b: b.update(rowwise_data=b["rowwise_data"].t().contiguous().t()), r"\[32, 16\] \(not contiguous\)"),
    (lambda b: b.update(rowwise_data=b["rowwise_data"].t()), r"must be contiguous .* got .* \[16, 32\]"),
    (lambda b: b.update(rowwise_amax=torch.zeros(2)), r"rowwise_amax .* torch.float32 \[1\], got torch.float32 \[2\]"),
    (lambda b: b.update(rowwise_amax=b["rowwise_amax"].to("meta")), "one device; got rowwise_data on cpu, .* on meta"),
    (lambda b: b.clear(), "from_buffers: there is neither rowwise_data nor columnwise_data"),
]


@pytest.mark.parametrize("damage, words", BROKEN)
def test_buffers_that_do_not_fit_their_spec_are_refused_in_words(damage, words):
    buffers = quire.quantize(torch.randn(32, 32), "nvfp4").buffers()
    damage(buffers)
    with pytest.raises(ValueError, match=words):
        QuantizedTensor.from_buffers(buffers, "nvfp4", (32, 32))


def test_protos_and_quantized_tensors_are_traced(compiler, equal_bits):
    def describe_and_fill(x):
        proto = TensorProto(x.shape, x.dtype, QuantSpec("nvfp4:rht"), columnwise=True)
        sizes = [n for shape, _ in proto.buffers().values() for n in shape]
        q = quire.quantize(x, proto.spec, columnwise=True)
        again = QuantizedTensor.from_buffers(vars_of(q), proto.spec, x.shape, x.dtype)
        return again.dequantize(), proto.create_tensor().columnwise_data.shape, sizes

    x = torch.randn(33, 64)
    compiled = compiler(describe_and_fill)
    y, shape, sizes = compiled(x)
    expected = describe_and_fill(x)
    assert equal_bits(y, expected[0]) and (shape, sizes) == expected[1:] and compiler.graphs == 1
