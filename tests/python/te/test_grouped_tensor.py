"""te.GroupedTensor: tensors in common memory, against tensors that are alone; and quantized parameters of layers."""

import copy
import io
import itertools

import pytest
import torch

import quire
import quire.te.pytorch as te
from every_recipe import ways
from steps import assert_rounded

pytestmark = pytest.mark.any_device

SHAPES = {"same": [(32, 64)] * 3, "rows": [(32, 64), (0, 64), (65, 64)], "columns": [(16, 32), (16, 128)]}
SHAPES["both"] = [(16, 32), (5, 64), (1, 96)]
QUANTIZERS = {
    "current": te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3),
    "delayed": te.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1), te.DType.kFloat8E5M2),
    "block": te.Float8BlockQuantizer(te.DType.kFloat8E4M3, block_scaling_dim=1, columnwise=False),
    "mxfp8": te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    "nvfp4": te.NVFP4Quantizer(),
}


def made(shapes, quantizer=None, dtype=torch.float32):
    return te.GroupedTensor.make_grouped_tensor_with_shapes(len(shapes), shapes, quantizer, dtype=dtype)


def values(shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * 2.0**i for i, shape in enumerate(shapes)]


@pytest.mark.cpu_only
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_plain_tensors_share_memory_in_their_order(shapes):
    grouped, given = made(shapes, dtype=torch.float16), values(shapes)
    assert not isinstance(grouped, torch.Tensor) and isinstance(grouped, te.GroupedTensor)
    assert grouped.has_data() and not grouped.has_columnwise_data() and grouped.quantizer is None
    for own, tensor in zip(grouped.split_into_quantized_tensors(), given, strict=True):
        assert type(own) is torch.Tensor and own.shape == tensor.shape
        own.copy_(tensor)
    flat = torch.cat([tensor.half().flatten() for tensor in given])
    assert torch.equal(grouped.rowwise_data, flat)
    assert all([torch.equal(a, b.half()) for a, b in zip(grouped.quantized_tensors, given, strict=True)])
    starts = [0, *itertools.accumulate(tensor.numel() for tensor in given)]
    assert grouped.offsets == starts and grouped.num_tensors == len(shapes) and grouped.tensor_shapes == shapes
    assert grouped.get_dtype() == grouped.dtype == torch.float16 and grouped.device == torch.device("cpu")


def test_shapes_are_told():
    same, rows, columns, both = [made(shapes) for shapes in SHAPES.values()]
    assert [each.logical_shape for each in (same, rows, columns, both)] == [(96, 64), (97, 64), (16, 160), (1, 928)]
    assert same.all_same_shape() and same.first_dims is same.last_dims is same.tensor_offsets is None
    assert same.get_common_first_dim() == 32 and same.get_common_last_dim() == 64
    assert rows.all_same_last_dim() and not rows.all_same_first_dim() and not rows.all_same_shape()
    assert rows.first_dims.tolist() == [32, 0, 65] and rows.last_dims is None
    assert rows.tensor_offsets.tolist() == [0, 2048, 2048, 6208] and rows.tensor_offsets.dtype == torch.int64
    assert columns.last_dims.tolist() == [32, 128] and columns.get_common_first_dim() == 16
    assert both.varying_both_dims() and not rows.varying_both_dims() and both.first_dims.tolist() == [16, 5, 1]
    with pytest.raises(RuntimeError, match=r"the first dimension is not the same in \[\(32, 64\)"):
        rows.get_common_first_dim()
    again = te.GroupedTensor.make_grouped_tensor(3, rows.first_dims, None, 97, 64, dtype=torch.float32)
    assert again.tensor_shapes == SHAPES["rows"]
    again = te.GroupedTensor.make_grouped_tensor(2, None, columns.last_dims, 16, 160, dtype=torch.float32)
    assert again.tensor_shapes == SHAPES["columns"]
    again = te.GroupedTensor.make_grouped_tensor(3, None, None, 96, 64, dtype=torch.float32)
    assert again.tensor_shapes == SHAPES["same"]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_tensors_are_quantized_as_alone_and_in_place(name, shapes):
    quantizer, given = QUANTIZERS[name], values(shapes)
    grouped = made(shapes, quantizer)
    memory = [tensor for tensor in grouped.get_data_tensors() if tensor is not None]
    where = [tensor.data_ptr() for tensor in memory]
    found = grouped.quantize(given)
    assert [t.data_ptr() for t in grouped.get_data_tensors() if t is not None] == where
    assert {t.dtype for t in memory} >= {torch.uint8} and all([t.dim() == 1 for t in memory])
    each = [quantizer(tensor) for tensor in given]
    for own, split, alone in zip(found, grouped.split_into_quantized_tensors(), each, strict=True):
        assert own.spec == alone.spec and own.shape == alone.shape
        for ours, again, theirs in zip(own.buffer_list(), split.buffer_list(), alone.buffer_list(), strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (torch.equal(ours, theirs) and again.data_ptr() == ours.data_ptr())
    for attribute, buffer in (("rowwise_data", 0), ("scale_inv", 1), ("columnwise_data", 3), ("amax", 2)):
        parts = [alone.buffer_list()[buffer] for alone in each]
        joined = getattr(grouped, attribute)
        assert (joined is None) == (parts[0] is None)
        assert joined is None or torch.equal(joined, torch.cat([part.flatten() for part in parts]))
    if grouped.all_same_last_dim():
        decoded = [alone.dequantize() for alone in each]
        wanted = torch.stack(decoded) if grouped.all_same_shape() else torch.cat(decoded)
        assert torch.equal(grouped.dequantize(), wanted)
        assert grouped.dequantize(torch.bfloat16).dtype == torch.bfloat16
    grouped.quantize([tensor * 3 for tensor in given], noop_flag=torch.ones(1))
    assert all(
        [torch.equal(a.dequantize(), b.dequantize()) for a, b in zip(grouped.quantized_tensors, each, strict=True)]
    )


@pytest.mark.cpu_only
def test_copies_have_memory_of_their_own():
    grouped = made(SHAPES["rows"], QUANTIZERS["mxfp8"])
    grouped.quantize(values(SHAPES["rows"]))
    file = io.BytesIO()
    torch.save(grouped, file)
    file.seek(0)
    before = grouped.dequantize()
    for other in (copy.deepcopy(grouped), torch.load(file, weights_only=False)):
        assert torch.equal(other.dequantize(), before) and repr(other) == repr(grouped)
        other.rowwise_data.zero_()
        assert torch.equal(grouped.dequantize(), before)
    assert repr(grouped) == "GroupedTensor([(32, 64), (0, 64), (65, 64)], dtype=torch.float32, 'mxfp8', device='cpu')"
    grouped.clear()
    assert grouped.num_tensors == 0 and grouped.logical_shape == (0, 0) and not grouped.has_data()
    assert grouped.rowwise_data is None and grouped.device is None and grouped.split_into_quantized_tensors() == []


@ways
def test_given_memory_is_used_and_functions_take_it(compiled, compiler):
    data = torch.randn(3, 4, 8)
    grouped = te.GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=3, tensor_shape=(4, 8), rowwise_data=data
    )

    def doubled(grouped):
        return [2 * tensor for tensor in grouped.split_into_quantized_tensors()], grouped.dequantize()

    each, whole = (compiler(doubled) if compiled else doubled)(grouped)
    assert torch.equal(torch.stack(each), 2 * data) and torch.equal(whole, data)
    assert grouped.rowwise_data.data_ptr() == data.data_ptr()


def test_what_does_not_fit_is_refused_with_nothing_changed():
    make, quantizer = te.GroupedTensor.make_grouped_tensor_with_shapes, QUANTIZERS["mxfp8"]
    grouped = made([(4, 32), (8, 32)], quantizer)
    grouped.quantize([torch.ones(4, 32), torch.ones(8, 32)])
    before = grouped.rowwise_data.clone()
    for call, error, words in (
        (lambda: make(3, [(4, 4)]), ValueError, r"of each of the 3 tensors, one or more; got \[\(4, 4\)\]"),
        (lambda: make(0, []), ValueError, "one or more"),
        (lambda: make(1, [(4,)]), ValueError, r"shapes must be \[rows, columns\]"),
        (lambda: make(1, [(4, 4)], "mxfp8"), TypeError, "quantizer must be a Quantizer or None, got 'mxfp8'"),
        (
            lambda: make(1, [(4, 4)], quantizer, dtype=torch.float64),
            ValueError,
            "float16 or bfloat16, got torch.float64",
        ),
        (lambda: grouped.quantize([torch.zeros(4, 32)]), ValueError, r"and tensors \[\(4, 32\)\]"),
        (
            lambda: grouped.quantize([torch.zeros(8, 32), torch.zeros(4, 32)]),
            ValueError,
            r"tensors \[\(8, 32\), \(4, 32",
        ),
        (lambda: made([(4, 4)]).quantize([torch.ones(4, 4)]), ValueError, "got no quantizer"),
        (lambda: made(SHAPES["both"]).dequantize(), ValueError, "the numbers of columns must be the same"),
        (
            lambda: te.GroupedTensor.make_grouped_tensor_from_rowwise_data(
                num_tensors=2, tensor_shape=(4, 8), rowwise_data=torch.ones(4, 8)
            ),
            ValueError,
            r"the values of 2 tensors \[4, 8\]",
        ),
    ):
        with pytest.raises(error, match=words):
            call()
    assert torch.equal(grouped.rowwise_data, before)


def layer():
    with quire.quantized_model_init(recipe=quire.recipe.MXFP8BlockScaling()):
        return te.GroupedLinear(3, 64, 32, single_grouped_weight=True, bias=False)


def test_quantized_single_parameters_have_its_attributes_and_plain_ones_stay_plain():
    made = layer()
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for one in (made, copy.deepcopy(made), torch.load(file, weights_only=False)):
        assert isinstance(one.weight, te.GroupedTensor) and isinstance(one.weight, torch.nn.Parameter)
        assert one.weight.num_tensors == 3 and one.weight.rowwise_data.numel() == one.weight.numel()
        for part, other in zip(one.weight.quantized_tensors, made.weight.split_into_quantized_tensors(), strict=True):
            assert isinstance(part, te.MXFP8Tensor) and torch.equal(part.dequantize(), other.dequantize())
    plain = te.GroupedLinear(3, 64, 32, single_grouped_weight=True).weight
    assert type(plain) is torch.nn.Parameter and not isinstance(plain, te.GroupedTensor)


@ways
def test_writing_to_the_tensors_of_groups_writes_to_the_parameter(compiled, compiler):
    made, x, sizes = layer(), torch.randn(12, 64), torch.tensor([4, 5, 3])
    function = compiler(made) if compiled else made
    recipe = quire.recipe.MXFP8BlockScaling()
    weights = torch.randn(3, 32, 64)
    with torch.no_grad(), te.autocast(recipe=recipe):
        function(x, sizes)
        for own, values in zip(made.weight.split_into_quantized_tensors(), weights, strict=True):
            own.copy_(values)
        found = function(x, sizes)
    weights = torch.stack([quire.quantize(each, made.weight.spec).dequantize() for each in weights])
    x = quire.quantize(x, recipe.input_spec).dequantize()
    parts = [part.double() @ w.double().T for part, w in zip(x.split([4, 5, 3]), weights, strict=True)]
    sizes = [part.double().abs() @ w.double().abs().T for part, w in zip(x.split([4, 5, 3]), weights, strict=True)]
    assert_rounded(found, torch.cat(parts), torch.cat(sizes), 64 + 12)  # numerics.md 7.5
