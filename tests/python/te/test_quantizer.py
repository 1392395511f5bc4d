"""Quantizers and tensor classes by TransformerEngine's names."""

import pytest
import torch

import pytorch
import quire
from quire import te
from quire.te import DType
from steps import same

pytestmark = pytest.mark.any_device

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
ONE = torch.ones(1)

# Each with the spec that it means (docs/numerics.md 1.5, 2, 3, 4, 5).
QUANTIZERS = [
    (te.Float8CurrentScalingQuantizer(E4M3, "cpu"), "fp8_tensor", E4M3),
    (
        te.Float8CurrentScalingQuantizer(E5M2, "cpu", force_pow_2_scales=True, amax_epsilon=0.5),
        "fp8_tensor:e5m2:pow2:eps=0.5",
        E5M2,
    ),
    (te.Float8BlockQuantizer(E4M3), "fp8_block:128x128:pow2", E4M3),
    (te.Float8BlockQuantizer(E4M3, force_pow_2_scales=False, block_scaling_dim=1), "fp8_block", E4M3),
    (te.MXFP8Quantizer(E5M2), "mxfp8:e5m2", E5M2),
    (te.MXFP8Quantizer(E4M3, with_2d_quantization=True), "mxfp8:32x32", E4M3),
    (te.NVFP4Quantizer(), "nvfp4", DType.kFloat4E2M1),
    (te.NVFP4Quantizer(with_2d_quantization=True), "nvfp4:16x16", DType.kFloat4E2M1),
    (te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True), "nvfp4:rht", DType.kFloat4E2M1),
    (
        te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False),
        "nvfp4:rht=unsigned",
        DType.kFloat4E2M1,
    ),
    (
        te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"),
        "nvfp4:4over6=mse:256",
        DType.kFloat4E2M1,
    ),
    (te.NVFP4Quantizer(row_scaled_nvfp4=True), "nvfp4:row_scaled", DType.kFloat4E2M1),
    (
        te.NVFP4Quantizer(row_scaled_nvfp4=True, nvfp4_use_4over6=True),
        "nvfp4:row_scaled:4over6=mae",
        DType.kFloat4E2M1,
    ),
]
NAMES = {
    "fp8_tensor": te.Float8Tensor,
    "fp8_block": te.Float8BlockwiseQTensor,
    "mxfp8": te.MXFP8Tensor,
    "nvfp4": te.NVFP4Tensor,
}


@pytest.mark.parametrize("quantizer, spec, dtype", QUANTIZERS, ids=lambda value: str(value))
def test_a_quantizer_gives_the_codes_of_its_spec(quantizer, spec, dtype, make_x, compiler):
    x = make_x(48, 96, requires_grad=False)
    expected = quire.quantize(x, spec, columnwise=True)
    assert quantizer.dtype is dtype and same(quantizer(x), expected)
    assert same(compiler(quantizer)(x), expected)
    for name, cls in NAMES.items():
        assert isinstance(quantizer(x), cls) == (spec.split(":")[0] == name)
    rows = quantizer.copy()
    rows.set_usage(columnwise=False)
    assert same(rows(x), quire.quantize(x, spec)) and quantizer.columnwise_usage
    assert quantizer.quantize(x, dtype=torch.float32).dtype == torch.float32
    empty = quantizer.make_empty((48, 96), dtype=torch.bfloat16)
    assert quantizer.update_quantized(x, empty) is empty and same(empty, expected)
    assert quantizer.quantize(2 * x, out=empty) is empty and same(empty, quire.quantize(2 * x, spec, columnwise=True))


@pytest.mark.parametrize("shape", [(1,), ()], ids=["one dimension", "none"])
def test_a_scale_that_is_given_is_used_and_the_amax_collected(shape, make_x):
    x = make_x(48, 96, dtype=torch.float32, requires_grad=False)
    scale, amax = torch.full(shape, 16.0), torch.full(shape, 0.5)
    quantizer = te.Float8Quantizer(scale, amax, E4M3)
    values = (x * 16).clamp(-448, 448).to(torch.float8_e4m3fn)
    q = quantizer(x)
    assert torch.equal(q.rowwise_data, values.view(torch.uint8)) and q.rowwise_scale == 1 / 16
    assert amax == x.abs().max()
    quantizer(x / 8)
    assert amax == x.abs().max()  # a maximum of all
    scale.fill_(4)
    quantizer.update_quantized(3 * x, q)
    assert q.rowwise_scale == 1 / 4 and amax == (3 * x).abs().max()
    columns = te.Float8Quantizer(scale, torch.zeros(shape), E4M3, rowwise=False)
    assert not columns(x).stores("rowwise") and columns.amax == x.abs().max() and columns.amax.shape == shape


def test_gradients_pass_as_if_nothing_were_rounded(make_x):
    x = make_x(32, 64)
    q = te.MXFP8Quantizer(E4M3)(x)
    assert isinstance(q, quire.QuantizedActivation)
    q.dequantize().sum().backward()
    assert torch.all(x.grad == 1)
    with pytest.raises(ValueError, match="the result has a gradient, and so the tensor's dtype"):
        te.MXFP8Quantizer(E4M3).quantize(x, dtype=torch.float32)


def test_stochastic_rounding_draws_its_seed_from_the_generator(make_x):
    x, quantizer = make_x(32, 64, requires_grad=False), te.NVFP4Quantizer(stochastic_rounding=True)
    torch.manual_seed(3)
    first, second = quantizer(x), quantizer(x)
    torch.manual_seed(3)
    assert same(quantizer(x), first) and not same(first, second)
    empty = quantizer.make_empty((32, 64))
    torch.manual_seed(3)
    assert same(quantizer.update_quantized(x, empty), first)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "act, error, words",
    [
        (lambda: te.MXFP8Quantizer(DType.kByte), ValueError, "MXFP8Quantizer: fp8_dtype must be DType.kFloat8E4M3"),
        (lambda: te.NVFP4Quantizer(E4M3), ValueError, "fp4_dtype must be DType.kFloat4E2M1"),
        (lambda: te.NVFP4Quantizer(with_rht=True), ValueError, "with_rht and with_post_rht_amax must be alike"),
        (lambda: te.NVFP4Quantizer(nvfp4_e4m3_max=300), ValueError, "must be 448 or 256, got 300"),
        (
            lambda: te.NVFP4Quantizer(with_2d_quantization=True, with_rht=True, with_post_rht_amax=True),
            ValueError,
            "16x16.*rht|rht.*16x16",
        ),
        (lambda: te.NVFP4Quantizer(nvfp4_e4m3_max=256), ValueError, "256"),
        (
            lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="RMS"),
            ValueError,
            "4over6=rms",
        ),
        (
            lambda: te.NVFP4Quantizer(with_amax_reduction=True),
            NotImplementedError,
            "with_amax_reduction=True is not",
        ),
        (
            lambda: te.Float8CurrentScalingQuantizer(E4M3, scale=ONE),
            NotImplementedError,
            "scale=.* is not available; Float8Quantizer takes a scale",
        ),
        (
            lambda: te.Float8Quantizer(2.0, ONE, E4M3),
            ValueError,
            r"scale must be a float32 tensor of one element",
        ),
        (lambda: te.Float8Quantizer(ONE, torch.ones(2), E4M3), ValueError, "amax must be .*got torch.float32"),
        (lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=3), ValueError, "must be 1 or 2, got 3"),
        (lambda: te.MXFP8Quantizer(E4M3, rowwise=False, columnwise=False), ValueError, "both be False"),
        (lambda: te.MXFP8Quantizer(E4M3, rowwise=1), TypeError, "rowwise must be a bool or None, got 1"),
        (
            lambda: te.MXFP8Quantizer(E4M3).make_empty((2, 32), pin_memory=True),
            NotImplementedError,
            "pin_memory=True",
        ),
        (
            lambda: te.MXFP8Quantizer(E4M3).update_quantized(ONE, ONE),
            TypeError,
            "dst must be a QuantizedTensor, got Tensor",
        ),
        (
            lambda: te.MXFP8Quantizer(E4M3).update_quantized(ONE, quire.quantize(ONE, "nvfp4")),
            ValueError,
            "dst is quantized as nvfp4, and this quantizes as mxfp8",
        ),
        (
            lambda: quire.quantize(ONE, "mxfp8").quantize_(ONE, noop_flag=torch.ones(2)),
            ValueError,
            "noop_flag must have one element, got the shape",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(act, error, words):
    with pytest.raises(error, match=words):
        act()


@pytest.mark.parametrize("spec", ["fp8_tensor", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("flag", [torch.tensor(0.0), torch.tensor([1.0]), torch.tensor(True)], ids=str)
def test_a_flag_keeps_what_a_tensor_stores(spec, flag):
    first, second = torch.linspace(-3, 5, 64 * 32).view(64, 32), torch.linspace(9, -1, 64 * 32).view(64, 32)
    expected = quire.quantize(first if flag.item() else second, spec)
    q = quire.quantize(first, spec)
    assert q.quantize_(second, noop_flag=flag) is q and same(q, expected)
    with quire.quantized_model_init(recipe=quire.recipe.CustomRecipe(lambda role: spec), keep_master=True):
        weight = quire.Linear(32, 64).weight
    weight.quantize_(first)
    weight.quantize_(second, noop_flag=flag)
    assert torch.equal(weight.master, first if flag.item() else second)
    weight.update_usage(columnwise_usage=False)
    assert same(weight, expected)


@pytest.mark.parametrize("quantizer, spec, dtype", QUANTIZERS, ids=lambda value: str(value))
def test_a_tensor_has_a_quantizer_that_quantizes_as_it_is_quantized(quantizer, spec, dtype):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for usage in ({}, {"rowwise": False}, {"columnwise": False}):
        quantizer = quantizer.copy()
        quantizer.set_usage(**{"rowwise": True, "columnwise": True} | usage)
        q = quantizer(x)
        found = q.quantizer
        assert type(found) is type(quantizer) and found.dtype is dtype and same(found(2 * x), quantizer(2 * x))
        found.set_usage(rowwise=True, columnwise=True)
        assert q.quantizer.columnwise_usage is quantizer.columnwise_usage
    assert type(quire.quantize(x, "mxfp4").quantizer) is te.Quantizer


def test_the_weights_of_groups_that_are_one_parameter_have_a_quantizer():
    with quire.quantized_model_init(recipe="mxfp8"):
        layer = quire.GroupedLinear(2, 32, 64, single_grouped_weight=True)
    assert isinstance(layer.weight.quantizer, te.MXFP8Quantizer) and layer.weight.quantizer.columnwise_usage
    x = torch.randn(64, 32)
    assert same(layer.weight.quantizer(x), quire.quantize(x, layer.weight.spec, columnwise=True))


@pytest.mark.parametrize("grad", [False, True])
def test_what_kind_a_tensor_is_is_not_answered_wrongly_where_classes_are_compared(grad, compiler):
    q = quire.quantize(torch.ones(2, 32, requires_grad=grad), "mxfp8")
    assert isinstance(q, te.MXFP8Tensor) and not isinstance(q, te.NVFP4Tensor)
    with pytest.raises(NotImplementedError, match="depends on its spec, not on its class"):
        issubclass(type(q), te.MXFP8Tensor)
    for kind, answer in ((te.MXFP8Tensor, 1), (te.NVFP4Tensor, 0)):
        asked = compiler(lambda q, kind=kind: q.dequantize() + isinstance(q, kind))
        if grad:  # of other objects than tensors it asks Python
            assert torch.equal(asked(q), q.dequantize() + answer)
        else:
            words = "read tensor.spec_text there" if pytorch.is_before("2.14") else "Dynamo cannot soundly trace"
            with pytest.raises(Exception, match=words):
                asked(q)
    assert not isinstance(q.dequantize(), te.MXFP8Tensor)


@pytest.mark.parametrize("spec", NAMES)
def test_an_activation_of_codes_has_the_names_of_a_quantized_tensor(spec):
    x = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q = quire.quantize(x, spec, columnwise=True)
    plain = q.detach()
    assert isinstance(q, quire.QuantizedActivation)
    assert [one for one in NAMES.values() if isinstance(q, one)] == [NAMES[spec]]
    assert spec != "mxfp8" or isinstance(q, te.MXFP8TensorStorage)
    assert q.get_data_tensors()[0] is q.rowwise_data and repr(q.quantizer) == repr(plain.quantizer)
