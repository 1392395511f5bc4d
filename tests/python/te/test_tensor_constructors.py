"""TransformerEngine's constructors of quantized tensors: values of given codes and scales, against float64."""

import copy
import pickle

import pytest
import torch

import quire.te as te
from steps import assert_rounded

pytestmark = pytest.mark.any_device

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
FLOATS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def codes(*shape, largest=120):
    return torch.randint(0, largest, shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.uint8)


def padded(scale, *multiples):
    """With a value in the padding that nobody may read."""
    rows, columns = (-size % multiple for size, multiple in zip(scale.shape, multiples, strict=True))
    return torch.nn.functional.pad(scale, (0, columns, 0, rows), value=77)


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_one_scale_for_all_values(shape, fp8_dtype):
    data, scale = codes(*shape), torch.tensor([0.375])
    expected = data.view(FLOATS[fp8_dtype]).double() * 0.375
    q = te.Float8Tensor(shape, torch.bfloat16, data=data, fp8_scale_inv=scale, fp8_dtype=fp8_dtype)
    assert isinstance(q, te.Float8Tensor) and isinstance(q, te.QuantizedTensor) and q.dtype == torch.bfloat16
    assert torch.equal(q.dequantize(torch.float32).double(), expected) and float(q.rowwise_amax) == expected.max()
    assert q.rowwise_data.data_ptr() == data.data_ptr()
    moved = data.reshape(-1, shape[-1]).t().contiguous()
    of_columns = te.Float8TensorStorage(data=None, data_transpose=moved, fp8_scale_inv=scale, fp8_dtype=fp8_dtype)
    assert torch.equal(of_columns.dequantize().double().reshape(expected.shape), expected)
    if len(shape) > 1:
        both = te.Float8Tensor(shape, data=data, data_transpose=moved, fp8_scale_inv=scale, fp8_dtype=fp8_dtype)
        assert both.get_data_tensors()[1] is not None and both.requires_grad is False


def test_a_scale_for_each_32_values():
    data, scale = codes(2, 20, 96), torch.randint(120, 132, (40, 3), dtype=torch.uint8)
    factor = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    rows = te.MXFP8Tensor(
        shape=(2, 20, 96),
        dtype=torch.float32,
        rowwise_data=data,
        rowwise_scale_inv=padded(scale, 128, 4),
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=E4M3,
        quantizer=None,
        requires_grad=True,
        with_gemm_swizzled_scales=False,
    )
    expected = data.view(torch.float8_e4m3fn).double() * factor.reshape(2, 20, 96)
    assert torch.equal(rows.dequantize().double(), expected) and rows.requires_grad and rows.is_leaf
    scale = torch.randint(120, 132, (2, 96), dtype=torch.uint8)
    columns = te.MXFP8TensorStorage(
        rowwise_data=None,
        rowwise_scale_inv=None,
        columnwise_data=data.reshape(40, 96),
        columnwise_scale_inv=padded(scale, 4, 128),
        fp8_dtype=E5M2,
        quantizer=te.MXFP8Quantizer(E5M2),
        fake_dtype=torch.float16,
    )
    factor = torch.exp2(scale.double() - 127).repeat_interleave(32, 0)[:40]
    expected = data.reshape(40, 96).view(torch.float8_e5m2).double() * factor
    assert torch.equal(columns.dequantize(torch.float32).double(), expected) and columns.dtype == torch.float16


@pytest.mark.parametrize("tiles", [False, True])
def test_a_scale_for_each_128_values(tiles):
    data = codes(130, 200)
    scale = torch.rand(2, 2) if tiles else torch.rand(2, 130)
    factor = scale.repeat_interleave(128, 0) if tiles else scale.t()
    expected = data.view(torch.float8_e4m3fn).double() * factor.repeat_interleave(128, 1)[:130, :200].double()
    options = {"columnwise_data": None, "columnwise_scale_inv": None, "quantizer": None}
    q = te.Float8BlockwiseQTensor(
        rowwise_data=data,
        rowwise_scale_inv=padded(scale, 1, 4),
        fp8_dtype=E4M3,
        is_2D_scaled=tiles,
        **options,
    )
    assert torch.equal(q.dequantize(), expected.float())  # a product that is rounded once
    assert isinstance(q, te.Float8BlockwiseQTensor) and q.shape == (130, 200)


@pytest.mark.cpu_only
@pytest.mark.parametrize("row_scaled", [False, True])
@pytest.mark.parametrize("most", [448, 256])
def test_two_levels_of_scales(row_scaled, most):
    nibbles, scale = codes(30, 48, largest=8), codes(30, 3)
    amax = torch.rand(30 if row_scaled else 1) + 1
    q = te.NVFP4Tensor(
        dtype=torch.float32,
        rowwise_data=nibbles[:, ::2] | nibbles[:, 1::2] << 4,
        rowwise_scale_inv=padded(scale, 128, 4),
        columnwise_data=None,
        columnwise_scale_inv=None,
        amax_rowwise=amax,
        amax_columnwise=None,
        fp4_dtype=te.DType.kFloat4E2M1,
        quantizer=None,
        row_scaled_nvfp4=row_scaled,
        nvfp4_use_4over6=most == 256,
        nvfp4_e4m3_max=most,
    )
    factor = scale.view(torch.float8_e4m3fn).double() * amax.double().reshape(-1, 1) / (6 * most)
    expected = E2M1[nibbles.long()] * factor.repeat_interleave(16, 1)
    # The amax is divided or multiplied by constants that are rounded, by at most two operations; then the scale of a
    # block and the code multiply: 2^-21 is 8 roundings.
    assert_rounded(q.dequantize(), expected, expected.abs(), 8)
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.clone()):
        assert torch.equal(other.dequantize(), q.dequantize())


def test_arguments_that_do_not_fit_are_refused():
    data, scale = codes(4, 64), torch.full((4, 2), 127, dtype=torch.uint8)
    given = {"rowwise_data": data, "rowwise_scale_inv": scale, "fp8_dtype": E4M3}
    for changed, kind, message in (
        ({"rowwise_data": None}, ValueError, "rowwise or columnwise data; got none"),
        ({"rowwise_scale_inv": scale[:3]}, ValueError, r"rowwise_scale of mxfp8 .* \[4, 2\], got .* \[3, 2\]"),
        ({"rowwise_scale_inv": None}, ValueError, "rowwise_scale of mxfp8 for shape .* is missing"),
        ({"rowwise_data": data.float()}, ValueError, "rowwise_data of mxfp8 .* got torch.float32"),
        ({"shape": (4, 32)}, ValueError, "rowwise_data of mxfp8 for shape"),
        ({"fp8_dtype": te.DType.kByte}, ValueError, "fp8_dtype must be DType.kFloat8E4M3"),
        ({"with_gemm_swizzled_scales": True}, NotImplementedError, "pass compact scales"),
        ({"quantizer": te.NVFP4Quantizer()}, ValueError, "must be one of 'mxfp8', got one of 'nvfp4'"),
        ({"quantizer": "mxfp8"}, TypeError, "quantizer must be a Quantizer"),
        ({"rowwise_data": [1]}, TypeError, "rowwise_data must be a tensor"),
        ({"scale": 1}, TypeError, "there is no argument 'scale'"),
    ):
        with pytest.raises(kind, match=message):
            te.MXFP8Tensor(**given | changed)
    with pytest.raises(TypeError, match="fp8_scale_inv must be a tensor"):
        te.Float8Tensor((4, 64), data=data, fp8_scale_inv=0.5, fp8_dtype=E4M3)
    with pytest.raises(ValueError, match="fp4_dtype must be DType.kFloat4E2M1"):
        te.NVFP4Tensor(rowwise_data=data, fp4_dtype=E4M3)
    assert not isinstance(data, te.MXFP8Tensor) and issubclass(te.MXFP8Tensor, te.MXFP8TensorStorage)
