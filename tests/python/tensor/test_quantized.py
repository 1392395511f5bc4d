"""QuantizedTensor under PyTorch's operators: what keeps the codes, what decodes them, what is refused."""

import copy
import warnings

import pytest
import torch

import quire
from python.tensor.tensor_specs import SPECS
from quire import QuantizedActivation, QuantizedTensor
from quire.tensor import BUFFER_NAMES, input_operand, operators
from steps import same

pytestmark = pytest.mark.any_device

TRANSPOSABLE = ["fp8_tensor", "fp8_tensor:e5m2:pow2", "fp8_block:128x128", "fp8_block:128x128:pow2", "mxfp8:32x32"]
TRANSPOSABLE += ["mxfp8:e5m2:32x32", "nvfp4:16x16", "nvfp4:16x16:global=mul"]


@pytest.fixture(params=SPECS)
def spec(request):
    return request.param


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def quantized(spec, *shape, dtype=torch.float32, columnwise=True, device="cpu"):
    return quire.quantize(values(*shape, dtype=dtype).to(device), spec, columnwise=columnwise)


def test_it_is_a_tensor_of_the_logical_shape(spec):
    q = quantized(spec, 2, 33, 50, dtype=torch.bfloat16)
    assert isinstance(q, torch.Tensor) and q.is_contiguous() and not q.requires_grad
    assert (q.shape, q.dtype, q.dim(), q.numel()) == (torch.Size([2, 33, 50]), torch.bfloat16, 3, 3300)
    assert q.spec_text == spec and [x is not None for x in q.buffer_list()] == [n in q.buffers() for n in BUFFER_NAMES]


def test_storage_holds_what_the_layout_says_and_nothing_else(spec):
    q = quantized(spec, 256, 512)
    expected = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in q.proto.buffers().items()}
    assert {name: t.untyped_storage().nbytes() for name, t in q.buffers().items()} == expected
    bits = {"fp8": 8, "mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}[spec.split(":")[0].split("_")[0]]
    assert 2 * 256 * 512 * bits / 8 <= q.nbytes <= 2 * 256 * 512 * bits / 8 * 1.04
    assert q.data_ptr() == 0  # no values beside them


def test_it_flattens_to_its_buffers_in_layout_order(spec, device):
    for columnwise in (False, True):
        q = quantized(spec, 32, 64, columnwise=columnwise, device=device)
        names, metadata = q.__tensor_flatten__()
        assert names == list(q.buffers()) == [name for name in BUFFER_NAMES if name in names]
        inner = {name: getattr(q, name) for name in names}
        again = QuantizedTensor.__tensor_unflatten__(inner, metadata, q.size(), q.stride())
        assert same(again, q) and again.proto == q.proto and hash(metadata) is not None


def test_detach_alias_and_copies(spec, device):
    q = quantized(spec, 32, 64, device=device)
    for share in (q.detach(), q.data, q.view(32, 64), q[:], q.as_strided((32, 64), (64, 1)), q.contiguous()):
        assert type(share) is QuantizedTensor and share.rowwise_data.data_ptr() == q.rowwise_data.data_ptr()
        assert same(share, q)
    for other in (q.clone(), q.to(device, copy=True), copy.deepcopy(q), q.half().float()):
        assert type(other) is QuantizedTensor and same(other, q)
        stored = {t.data_ptr() for t in q.buffers().values()}
        assert stored.isdisjoint(t.data_ptr() for t in other.buffers().values())


def test_a_dtype_is_nominal(spec, device):
    q = quantized(spec, 32, 64, device=device)
    for moved, dtype in ((q.to(torch.bfloat16), torch.bfloat16), (q.half(), torch.float16)):
        assert type(moved) is QuantizedTensor and moved.dtype == dtype and same(moved, q)
        assert torch.equal(moved.dequantize(), q.dequantize(dtype))
    assert q.float() is q
    for plain in (q.double(), q.to(torch.int32)):
        assert type(plain) is torch.Tensor
    assert torch.equal(q.double(), q.dequantize().double())


def test_meta_tensors_have_layout_only(spec):
    q = quantized(spec, 32, 64).to("meta")
    assert q.is_meta and all(t.is_meta for t in q.buffers().values()) and q.proto.device == torch.device("meta")
    empty = torch.empty_like(q, device="cpu")
    assert type(empty) is QuantizedTensor and {n: (tuple(t.shape), t.dtype) for n, t in empty.buffers().items()} == (
        q.proto.buffers()
    )


def test_leading_sizes_may_change(spec, device):
    q = quantized(spec, 4, 16, 50, device=device)
    dense = q.dequantize()
    views = [lambda t: t.view(64, 50), lambda t: t.reshape(2, 2, 16, 50), lambda t: t.flatten(0, 1)]
    views += [lambda t: t.unsqueeze(0), lambda t: t.view(8, -1, 50), lambda t: t[None], lambda t: t.view(-1, 50)[:]]
    for view in views:
        result = view(q)
        assert type(result) is QuantizedTensor and torch.equal(result.dequantize(), view(dense))
        expected = quire.quantize(view(values(4, 16, 50)).to(device), spec, columnwise=True)
        assert same(result, expected) and result.proto == expected.proto


PARTS = [lambda t: t[128:256], lambda t: t.narrow(0, 256, 44), lambda t: t[0:128], lambda t: t.view(3, 100, 72)[:, :]]


@pytest.mark.parametrize("part", PARTS)
def test_whole_rows_keep_their_codes(spec, part, device):
    q = quantized(spec, 300, 72, device=device)
    result = part(q)
    assert type(result) is QuantizedTensor and torch.equal(result.dequantize(), part(q.dequantize()))
    assert QuantizedTensor.from_buffers(result.buffers(), spec, result.shape).proto == result.proto
    assert result.rowwise_data.untyped_storage().data_ptr() == q.rowwise_data.untyped_storage().data_ptr()


def test_a_view_beyond_the_end_is_refused():
    with pytest.raises(RuntimeError):
        quantized("mxfp8", 32, 64).as_strided((32, 64), (64, 1), 64)


def test_lists_of_rows_keep_their_codes(spec, device):
    q = quantized(spec, 384, 72, device=device)
    for cut in (lambda t: t.split(128), lambda t: t.chunk(3), lambda t: t.split([128, 256])):
        for result, expected in zip(cut(q), cut(q.dequantize()), strict=True):
            assert type(result) is QuantizedTensor and torch.equal(result.dequantize(), expected)


CUTS = {
    "chunk": lambda t: t.chunk(2, dim=-1),
    "chunk of uneven parts": lambda t: t.chunk(3, dim=1),
    "split": lambda t: t.split(32, dim=1),
    "split with sizes": lambda t: t.split([8, 24, 16], dim=-1),
    "tensor_split": lambda t: t.tensor_split([5, 40], dim=1),
    "hsplit": lambda t: t.hsplit(3) if t.dim() == 2 else t.dsplit(3),
    "unbind": lambda t: t.unbind(1),
    "narrow": lambda t: [t.narrow(-1, 8, 16), t.narrow(0, 1, 3).narrow(-1, 40, 8)],
    "slice": lambda t: [t[..., 3:], t[:, :16], t[::2], t[1:3, ..., ::5]],
    "select": lambda t: [t[..., 7], t[1:4, 9]],
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [(60, 48), (6, 60, 48)])
@pytest.mark.parametrize("cut", CUTS)
def test_any_part_of_a_tensor_with_one_scale_keeps_its_codes(cut, shape, mode, device):
    for spec in ("fp8_tensor", "fp8_tensor:e5m2", "fp8_tensor:pow2"):
        with mode():
            q = quantized(spec, *shape, device=device)
            before = q.dequantize()
            results, expected = CUTS[cut](q), CUTS[cut](before)
        for result, wanted in zip(results, expected, strict=True):
            assert type(result) is QuantizedTensor and torch.equal(result.dequantize(), wanted)
            assert QuantizedTensor.from_buffers(result.buffers(), spec, result.shape).proto == result.proto
            assert torch.equal(result.reshape(-1) + 0, wanted.reshape(-1)), "PyTorch copies what has no such view"
        if device.type != "cpu":  # the test device cannot write to plain tensors with strides
            continue
        with mode():
            results[0].zero_()
            expected[0].zero_()
        assert not q.dequantize()[before == 0].any(), "a write to a part is one to the tensor"


@pytest.mark.parametrize("cut", CUTS)
def test_columns_that_share_scales_with_others_are_decoded(cut, device):
    for spec in ("fp8_row", "fp8_block", "mxfp8", "nvfp4", "fp8_tensor:interleaved"):
        q = quantized(spec, 60, 48, device=device)
        for result, wanted in zip(CUTS[cut](q), CUTS[cut](q.dequantize()), strict=True):
            assert not isinstance(result, QuantizedTensor) and torch.equal(result, wanted)


def test_rows_within_a_tile_are_decoded(device):
    for spec in ("fp8_block:128x128", "mxfp8:32x32", "nvfp4:16x16", "mxfp8:swizzled"):
        q = quantized(spec, 256, 64, device=device)
        for part in (lambda t: t[8:], lambda t: t[:8], lambda t: t[3]):
            assert not isinstance(part(q), QuantizedTensor) and torch.equal(part(q), part(q.dequantize()))
    assert type(quantized("nvfp4", 256, 64, device=device)[3]) is QuantizedTensor


FOREIGN = [
    lambda t: t.t(),
    lambda t: t + 1,
    lambda t: t.sum(),
    lambda t: torch.cat([t, t]),
    lambda t: torch.stack((t[:32], t[32:])),
    lambda t: t @ t.t(),
    lambda t: t.view(-1),
    lambda t: t.expand(2, 64, 48),
    lambda t: t.view(torch.int32),
    lambda t: t[[1, 5]],
    lambda t: torch.zeros_like(t),
    lambda t: torch.full_like(t, 3),
    lambda t: t.new_zeros(3),
    lambda t: torch.nn.functional.linear(t, t),
]


@pytest.mark.parametrize("function", FOREIGN)
def test_other_operators_compute_on_decoded_values(function, device):
    for spec in ("fp8_tensor", "mxfp8", "nvfp4:16x16"):
        q = quantized(spec, 64, 48, device=device)
        result = function(q)
        assert not isinstance(result, QuantizedTensor) and torch.equal(result, function(q.dequantize()))
        assert type(result + 0) is torch.Tensor


def test_codes_and_values_are_those_of_the_cpu(spec, device):
    q, expected = quantized(spec, 2, 33, 50, device=device), quantized(spec, 2, 33, 50)
    assert q.device.type == device.type and same(q, expected) and same(q.to("cpu"), expected)
    assert torch.equal(q.dequantize().cpu(), expected.dequantize())


def test_values_can_be_read_and_compared(spec, device):
    q = quantized(spec, 32, 64, device=device)
    assert torch.equal(q, q.clone()) and not torch.equal(q, q * 2) and torch.equal(q, q.dequantize())
    assert q[1, 2].item() == q.dequantize()[1, 2].item() and torch.allclose(q, q.dequantize())
    assert f"QuantizedTensor('{spec}', shape=[32, 64]" in repr(q) and f"{q}" == repr(q)
    assert repr(q.requires_grad_()).endswith("requires_grad=True)")


@pytest.mark.parametrize("operator", ["quantize", "dequantize", "linear"])
def test_our_own_operators_refuse_it_in_words(operator):
    q = quantized("mxfp8", 32, 32)
    calls = {
        "quantize": lambda: quire.quantize(q, "mxfp8"),
        "dequantize": lambda: torch.ops.quire.dequantize(
            q, q.rowwise_scale, torch.empty(0), "mxfp8", False, (32, 32), torch.float32
        ),
        "linear": lambda: torch.ops.quire.linear(q, values(8, 32), None, "x=mxfp8,w=mxfp8,dy=mxfp8", torch.float32),
    }
    with pytest.raises(TypeError, match=rf"quire.{operator}\S* was given a QuantizedTensor; it takes plain tensors.*"):
        calls[operator]()


@pytest.mark.parametrize("text", TRANSPOSABLE)
@pytest.mark.parametrize("shape", [(256, 128), (33, 50), (2, 31, 7), (5,), (0, 32), (32, 0)], ids=str)
def test_a_direction_is_added_where_its_codes_follow(text, shape, device):
    both = quantized(text, *shape, device=device)
    for direction in ("rowwise", "columnwise"):
        q = both.clone()
        q.update_usage(**{f"{direction}_usage": False})
        assert getattr(q, f"{direction}_data") is None and q.nbytes < both.nbytes or 0 in shape
        q.update_usage(**{f"{direction}_usage": True})
        assert same(q, both) and q.proto == both.proto


def test_a_direction_that_does_not_follow_is_refused_or_rounded_again(device):
    for spec in set(SPECS) - set(TRANSPOSABLE):
        both = quantized(spec, 64, 96, device=device)
        q = both.clone()
        q.update_usage(columnwise_usage=False)
        with pytest.raises(ValueError, match=f"columnwise codes of {spec} do not follow.*requantize=True"):
            q.update_usage(columnwise_usage=True)
        assert q.columnwise_data is None
        q.update_usage(columnwise_usage=True, requantize=True)
        again = quire.quantize(q.dequantize(), spec, rowwise=False, columnwise=True)
        assert q.proto == both.proto and torch.equal(q.columnwise_data, again.columnwise_data)


def test_dropping_a_direction_frees_its_memory():
    q = quantized("nvfp4:16x16", 64, 64)
    gone = torch.multiprocessing.reductions.StorageWeakRef(q.columnwise_data.untyped_storage())
    q.update_usage(columnwise_usage=False)
    assert gone.expired() and q.columnwise_scale is None and q.columnwise_amax is None
    with pytest.raises(ValueError, match="both False"):
        q.update_usage(rowwise_usage=False)
    assert q.rowwise_data is not None


def test_make_like_shares_buffers():
    q = quantized("mxfp8", 32, 64)
    other = QuantizedTensor.make_like(q, dtype=torch.float16, requires_grad=True)
    assert other.dtype == torch.float16 and other.requires_grad and other.rowwise_data is q.rowwise_data
    with pytest.raises(ValueError, match=r"the shape must be the tensor's, \[32, 64\], got \[64, 32\]; view"):
        QuantizedTensor.make_like(q, shape=(64, 32))


#: Arguments of the constructor beside those of a tensor [32, 64] of mxfp8 with rowwise codes.
WRONG_PARTS = {
    "strides of the transposed": (
        {"strides": (1, 32)},
        ValueError,
        r"strides must be those of a contig.* got \(1, 32\)",
    ),
    "a number as strides": ({"strides": 5}, ValueError, "got 5; leave them out"),
    "a smaller master": (
        {"master": torch.ones(3)},
        ValueError,
        r"master must be float32 \[32, 64\] on cpu, got .* \[3\]",
    ),
    "a master elsewhere": ({"master": torch.ones(32, 64, device="meta")}, ValueError, "on cpu, got .* on meta"),
    "a master in half": ({"master": torch.ones(32, 64).half()}, ValueError, "got torch.float16"),
    "a number as master": ({"master": 1.0}, TypeError, "master must be a tensor, got 1.0"),
    "a scale of a block format": ({"given_scale": torch.ones(1)}, ValueError, "only fp8_tensor and the option given"),
    "another name": ({"rowwise_codes": None}, TypeError, "no option 'rowwise_codes'; the options are rowwise_data, "),
    "an integer dtype": (
        {"dtype": torch.int8},
        ValueError,
        "dtype must be float32, float16 or bfloat16, got torch.int8",
    ),
    "an unknown family": ({"spec": "mxfp9"}, ValueError, "spec: unknown family in '>>mxfp9<<'"),
    "no spec": ({"spec": None}, TypeError, "spec: expected a text such as 'nvfp4:rht:sr', got None"),
    "a number as shape": ({"shape": 64}, ValueError, "shape must be a sequence of sizes, got 64"),
    "another shape": ({"shape": (64, 64)}, ValueError, r"rowwise_data of mxfp8 for shape \[64, 64\] must be"),
    "text for a flag": ({"requires_grad": "no"}, TypeError, "requires_grad must be a bool, got 'no'"),
    "no codes": (
        {"rowwise_data": None, "columnwise_data": None},
        ValueError,
        "there is neither rowwise_data nor columnwise_data",
    ),
    "a list as codes": ({"rowwise_data": [1]}, TypeError, r"rowwise_data must be a tensor, got \[1\]"),
    "no scales": ({"rowwise_scale": None}, ValueError, "rowwise_scale of mxfp8 .* is missing"),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", WRONG_PARTS)
def test_the_constructor_refuses_what_makes_no_tensor(name):
    wrong, error, words = WRONG_PARTS[name]
    parts = {"spec": "mxfp8", "shape": (32, 64), "dtype": torch.float32, **quantized("mxfp8", 32, 64).buffers()}
    with pytest.raises(error, match=f"^quire.QuantizedTensor: .*{words}"):
        QuantizedTensor(**{**parts, **wrong})


@pytest.mark.cpu_only
def test_the_constructor_takes_texts_and_lists():
    q = quire.quantize(values(32, 64), "mxfp8")
    made = QuantizedTensor("mxfp8", [32, 64], torch.float32, strides=[64, 1], master=values(32, 64), **q.buffers())
    assert made.spec == q.spec and same(made.buffers(), q.buffers()) and torch.equal(made + 1, values(32, 64) + 1)


WRONG_USES = {
    "codes of no direction": (lambda q: q.stores("both"), ValueError, "stores: direction must be 'rowwise' or 'column"),
    "a number as data": (lambda q: setattr(q, "data", 1), TypeError, "QuantizedTensor.data: expected .* got 1;"),
    "text as a dtype": (
        lambda q: q.dequantize("float32"),
        TypeError,
        "dequantize: dtype must be a torch.dtype, got 'flo",
    ),
    "a number as shape": (lambda q: QuantizedTensor.make_like(q, shape=64), ValueError, "the shape must be .* got 64;"),
    "text for a flag": (
        lambda q: QuantizedTensor.make_like(q, requires_grad="no"),
        TypeError,
        "make_like: requires_grad must be a bool, got 'no'",
    ),
    "buffers of a number": (
        lambda q: QuantizedTensor.from_buffers(q.buffers(), "mxfp8", 64),
        ValueError,
        "QuantizedTensor.from_buffers: shape must be a sequence of sizes, got 64",
    ),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", WRONG_USES)
def test_a_use_with_a_wrong_argument_is_refused_in_words(name):
    use, error, words = WRONG_USES[name]
    with pytest.raises(error, match=words):
        use(quantized("mxfp8", 32, 64))


def test_a_gradient_passes_decoding_as_it_is(device):
    q = quantized("nvfp4:16x16", 16, 16, dtype=torch.bfloat16, device=device).requires_grad_()
    (q.dequantize(torch.float32) * 3).sum().backward()
    assert type(q.grad) is torch.Tensor and q.grad.dtype == torch.bfloat16 and torch.equal(q.grad, q.grad * 0 + 3)
    q.grad = None
    (q * 2).sum().backward()
    assert type(q.grad) is torch.Tensor and torch.equal(q.grad.float(), torch.full((16, 16), 2.0, device=device))


def coarse(*shape):
    """Few values, which make ties of tiles under 4over6: rows and columns decide some of them otherwise."""
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(0)).float() * 1.3


@pytest.mark.parametrize("text", [*TRANSPOSABLE, "nvfp4:16x16:4over6=mae:256", "nvfp4:16x16:4over6=mse"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_no_direction_is_made_with_other_bytes_than_quantizing_gives(text, direction, device):
    both = quire.quantize(coarse(256, 256).to(device), text, columnwise=True)
    q = both.clone()
    q.update_usage(**{f"{direction}_usage": False})
    activation = QuantizedActivation(torch.empty(1, device=device).expand(256, 256), tuple(q.buffer_list()), text)
    if text in TRANSPOSABLE:
        q.update_usage(**{f"{direction}_usage": True})
        assert same(q, both)
        _, buffers, _ = input_operand(activation, True)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(buffers, both.buffer_list(), strict=True))
        return
    with pytest.raises(ValueError, match=f"{direction} codes of {text} do not follow from the stored ones"):
        q.update_usage(**{f"{direction}_usage": True})
    options = {"rowwise": direction == "rowwise", "columnwise": direction == "columnwise"}
    again = quire.quantize(q.dequantize(torch.float32), text, **options).buffer_list()
    _, buffers, _ = input_operand(activation, True)
    kept = range(3) if direction == "rowwise" else range(3, 6)
    assert all(again[i] is buffers[i] is None or torch.equal(again[i], buffers[i]) for i in kept)


def test_a_layer_of_pytorch_does_not_decode_its_weight_without_a_word():
    layer = torch.nn.Linear(64, 32)
    layer.weight = torch.nn.Parameter(quire.quantize(layer.weight.detach(), "mxfp8"), requires_grad=False)
    for context in (torch.enable_grad, torch.inference_mode):
        operators._tell_decoding.cache_clear()
        with pytest.warns(UserWarning, match="torch.nn.Linear with a quantized weight.*quire.convert"), context():
            layer(torch.randn(2, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(2, 64))


@pytest.mark.parametrize("stacked", [False, True])
def test_inference_mode_detaches_what_was_made_outside_of_it(stacked):
    q = quire.quantize(torch.randn(4, 64), "mxfp8", columnwise=True)
    q = torch.nn.Parameter(quire.QuantizedStack.of([q, q]) if stacked else q)
    expected = q.dequantize().detach()
    with torch.inference_mode():
        for found in (q.detach(), q.data, q.detach().detach()):
            assert (
                type(found) is type(q.detach())
                and not found.requires_grad
                and not isinstance(found, torch.nn.Parameter)
            )
            assert torch.equal(found.dequantize(), expected)
            assert found.rowwise_data.data_ptr() == q.rowwise_data.data_ptr()
