"""The operators below quire.GroupedLinear: opcheck, and buffers that hold any division into groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire  # noqa: F401  loads the operators
from every_recipe import SPECS_OF_ONE_FAMILY, TABLE, linear_specs
from pairwise import each_value
from quire_torch.one_group import backward, forward, linear

pytestmark = pytest.mark.any_device

RECIPES = {
    "high_precision": "",
    **linear_specs("fp8_current", "fp8_block", "fp8_block_x2d", "mxfp8", "nvfp4", "nvfp4_row_scaled"),
    **linear_specs("mxfp8_high_precision", "mxfp8_dequantized"),
    "mxfp8_requantized": TABLE["mxfp8"].linear_spec(save_original_input=True),
    "fp8_dx": TABLE["fp8_current"].linear_spec(fp8_grad=True),
    **SPECS_OF_ONE_FAMILY,
    "swizzled": "x=nvfp4:swizzled,w=mxfp8:swizzled,dy=nvfp4:swizzled",
}
QUANTIZED = {name: text for name, text in RECIPES.items() if text and "backward=" not in text and "dx=" not in text}
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ops = torch.ops.quire


def check(op, *args, **kwargs):
    result = torch.library.opcheck(op, args, kwargs, test_utils=UTILITIES)
    assert result == dict.fromkeys(UTILITIES, "SUCCESS")


def tensors(rows=9, k=32, n=24, groups=3, grad=True):
    torch.manual_seed(0)
    x = torch.randn(rows, k, requires_grad=grad)
    w = [torch.randn(n, k, requires_grad=grad) for _ in range(groups)]
    return x, w, [torch.randn(n, requires_grad=grad) for _ in range(groups)]


def spec_of_w(text):
    return text.split(",")[1].removeprefix("w=")


def columnwise(data, scale, amax):
    """What linear_fwd returned of w, as backward takes it."""
    return [None, None, None, data, scale, amax]


def sr_state():
    return torch.tensor([7, 0])


@pytest.mark.cpu_only
@pytest.mark.parametrize(("name", "dtype"), each_value(list(RECIPES), [torch.int32, torch.int64]))
def test_grouped_linear_passes_opcheck(name, dtype):
    x, w, bias = tensors()
    offsets = torch.tensor([4, 4, 8], dtype=dtype)
    check(ops.grouped_linear, x, w, bias, offsets, RECIPES[name], torch.float32, [], [], [], sr_state=sr_state())
    stacked = [torch.stack(w).detach().requires_grad_()]
    memory = {"out": torch.empty(9, 24), "dgrad_out": torch.empty(9, 32)}
    arguments = (x, stacked, [], offsets, RECIPES[name], torch.float32, [], [], [])
    check(ops.grouped_linear, *arguments, sr_state=sr_state(), **memory)


@pytest.mark.parametrize(("name", "rows"), each_value(list(QUANTIZED), [9, 0]))
def test_inner_operators_pass_opcheck(name, rows):
    x, w, bias = tensors(rows, grad=False)
    offsets, text = torch.tensor([rows // 2, rows // 2, rows]), QUANTIZED[name]
    forward = (x, w, bias, offsets, 24, text, torch.float32, 3, [], [])
    check(ops.linear_fwd, *forward)
    y, *saved = ops.linear_fwd(*forward)
    x_codes, w_codes = saved[:3], columnwise(*saved[3:])
    for needs in (7, 13):
        check(ops.linear_bwd, y, offsets, *x_codes, w_codes, 32, text, torch.float32, needs, sr_state())
    codes = [torch.cat([ops.quantize(one, spec_of_w(text), True, False)[i].flatten() for one in w]) for i in range(3)]
    for of_w in ((w, []), ([], [*codes, None, None, None])):
        check(ops.linear_unquantized_bwd, y, offsets, x, *of_w, 32, text, torch.float32, 7)


@pytest.mark.parametrize("spec", ["fp8_tensor", "mxfp8", "nvfp4", "nvfp4:rht:swizzled"])
@pytest.mark.parametrize("columnwise", [False, True])
def test_grouped_quantize_passes_opcheck(spec, columnwise):
    x, offsets = tensors(grad=False)[0], torch.tensor([4, 4, 8])
    check(ops.grouped_quantize, x, offsets, spec, columnwise)
    if spec == "fp8_tensor":
        check(ops.grouped_quantize, x, offsets, spec, columnwise, torch.tensor([1.0, 2.0, 4.0]))
    if not columnwise:
        check(ops.grouped_dequantize, *ops.grouped_quantize(x, offsets, spec, False), offsets, spec, x.shape, x.dtype)


@pytest.mark.parametrize("spec", ["fp8_tensor", "fp8_row", "nvfp4", "nvfp4:rht"])
@pytest.mark.parametrize("columnwise", [False, True])
def test_amaxes_of_groups_are_those_of_tensors_and_quantize_under_them(spec, columnwise):
    x, offsets = tensors(70, 48, grad=False)[0], torch.tensor([3, 3, 40, 67])
    check(ops.grouped_amax, x, offsets, spec, columnwise)
    amax = ops.grouped_amax(x, offsets, spec, columnwise)
    parts = [x[0:3], x[3:3], x[3:40], x[40:67]]
    each = [ops.amax(part, spec, not columnwise, columnwise)[columnwise] for part in parts]
    found = torch.cat(each) if spec != "fp8_row" or columnwise else torch.cat([*each, torch.zeros(3)])
    assert torch.equal(amax, found)
    measured = ops.grouped_quantize(x, offsets, spec, columnwise)
    given = ops.grouped_quantize(x, offsets, spec, columnwise, given_amax=amax)
    assert all(map(torch.equal, measured, given))
    larger = ops.grouped_quantize(x, offsets, spec, columnwise, given_amax=4 * amax)
    assert not all(map(torch.equal, larger[:2], measured[:2]))
    with pytest.raises(RuntimeError, match="given_amax of .* must be what quire::grouped_amax returns"):
        ops.grouped_quantize(x, offsets, spec, columnwise, given_amax=amax[1:])
    with pytest.raises(RuntimeError, match="scales of mxfp8 follow from blocks alone"):
        ops.grouped_amax(x, offsets, "mxfp8", columnwise)


@pytest.mark.parametrize("spec", ["fp8_tensor", "fp8_row", "nvfp4"])
def test_amaxes_of_no_rows_are_not_refused(spec):
    x, offsets = torch.empty(0, 48), torch.tensor([0, 0])
    given = ops.grouped_quantize(x, offsets, spec, False, given_amax=ops.grouped_amax(x, offsets, spec, False))
    assert all(map(torch.equal, given, ops.grouped_quantize(x, offsets, spec, False)))


@pytest.mark.parametrize("spec", ["fp8_tensor", "mxfp8", "nvfp4", "fp8_block"])
def test_values_of_groups_are_those_of_tensors(spec):
    x, offsets = tensors(70, 48, grad=False)[0], torch.tensor([3, 3, 40, 67])
    x[3:40] *= 300
    values = ops.grouped_dequantize(*ops.grouped_quantize(x, offsets, spec, False), offsets, spec, x.shape, x.dtype)
    for part in (slice(0, 3), slice(3, 40), slice(40, 67)):
        assert torch.equal(values[part], quire.quantize(x[part], spec).dequantize())
    assert not values[67:].any()


@pytest.mark.parametrize("spec", ["fp8_tensor", "mxfp8", "nvfp4:rht:nan", "fp8_block"])
@pytest.mark.parametrize("rows", [3, 40])
def test_buffers_of_a_tensor_of_another_size_are_refused(spec, rows):
    """Without offsets there is one group, whose buffers are those of the tensor."""
    buffers = ops.grouped_quantize(torch.randn(rows, 64), None, spec, False)
    with pytest.raises(RuntimeError, match=r"grouped_dequantize: data.*\[5, 64\]"):
        ops.grouped_dequantize(*buffers, None, spec, (5, 64), torch.float32)
    assert ops.grouped_dequantize(*buffers, None, spec, (rows, 64), torch.float32).shape == (rows, 64)


@pytest.mark.parametrize("scaled", [False, True])
def test_dx_is_rounded_in_each_group(scaled):
    x, w, _ = tensors()
    text, ends = RECIPES["fp8_dx"], torch.tensor([4, 4, 8])
    state = {"bwd_scale": torch.tensor([1.0, 1, 1, 0.37, 1, 5.3]), "bwd_amax": torch.zeros(6)} if scaled else {}
    y, *_ = ops.grouped_linear(x, w, [], ends, text, torch.float32, [], [], [], **state)
    dy = torch.randn_like(y) * torch.tensor([1.0] * 4 + [100] * 5)[:, None]
    (dx,) = torch.autograd.grad(y, x, dy)
    for group, part in ((0, slice(0, 4)), (2, slice(4, 8))):
        own = x[part].detach().requires_grad_()
        one = {name: t[group::3].clone() for name, t in state.items()}
        z = linear(own, w[group], None, text, torch.float32, **one)
        assert torch.equal(dx[part], torch.autograd.grad(z, own, dy[part])[0])
        assert all(torch.equal(one[name], state[name][group::3]) for name in one)
    assert not dx[8:].any()


@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 70), min_size=1, max_size=9), beyond=st.integers(0, 3))
def test_buffers_hold_any_division_into_groups(name, sizes, beyond):
    x, w, _ = tensors(sum(sizes) + beyond, 20, 12, len(sizes), grad=False)
    offsets, text = torch.tensor(sizes).cumsum(0), QUANTIZED[name]
    y, *saved = ops.linear_fwd(x, w, [], offsets, 12, text, torch.float32, 3, [], [])
    of_w = columnwise(*saved[3:])
    dx, dw, *_ = ops.linear_bwd(y, offsets, *saved[:3], of_w, 20, text, torch.float32, 3, sr_state())
    for group, (one, size) in enumerate(zip(w, sizes, strict=True)):
        part = slice(int(offsets[group]) - size, int(offsets[group]))
        of_one, *kept = ops.linear_fwd(*forward(x[part], one, None, text, 3))
        state = torch.tensor([7 + group, 0])
        dx_of_one, dw_of_one, *_ = ops.linear_bwd(*backward(of_one, kept, 20, text, 3, state))
        assert torch.equal(y[part], of_one)
        assert torch.equal(dx[part], dx_of_one)
        assert torch.equal(dw[group], dw_of_one)


@pytest.mark.cpu_only
def test_buffers_of_another_operand_are_refused():
    x, w, _ = tensors(grad=False)
    offsets, text = torch.tensor([4, 4, 8]), RECIPES["mxfp8"]
    y, *saved = ops.linear_fwd(x, w, [], offsets, 24, text, torch.float32, 3, [], [])
    x_codes, w_codes = saved[:3], columnwise(*saved[3:])
    with pytest.raises(RuntimeError, match="linear_bwd: x: columnwise_data of mxfp8:nan for 3 groups of 8 rows"):
        ops.linear_bwd(y, offsets, x_codes[0][:-40], *x_codes[1:], w_codes, 32, text, torch.float32, 3)
    with pytest.raises(RuntimeError, match="columnwise_data of mxfp8:nan must be contiguous Byte, got Float"):
        ops.linear_bwd(y, offsets, x_codes[0].float(), *x_codes[1:], w_codes, 32, text, torch.float32, 3)
    with pytest.raises(RuntimeError, match="linear_bwd: w: columnwise_data of mxfp8:nan for 3 groups of 72 rows"):
        ops.linear_bwd(y, offsets, *x_codes, columnwise(w_codes[3][:-1], *w_codes[4:]), 32, text, y.dtype, 3)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([4.0, 8.0])}, "offsets must be an int32 or int64 vector"),
        ({"offsets": torch.empty(0, dtype=torch.int64)}, "must have the end of at least one group, got none"),
        ({"w": []}, r"w must be matrices \[out_features, in_features\], one for each group"),
        ({"w": [torch.ones(24, 32), torch.ones(23, 32)]}, r"linear: w must be \[24, 32\], got \[23, 32\]"),
        ({"bias": [torch.ones(24)] * 3}, "bias must be one tensor for each of the 2 groups"),
        ({"x": torch.ones(9, 32, dtype=torch.int32)}, "linear: x must be float32, float16 or bfloat16"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    x, w, bias = tensors(groups=2, grad=False)
    arguments = {"x": x, "w": w, "bias": bias, "offsets": torch.tensor([4, 8]), "recipe": RECIPES["mxfp8"]}
    arguments |= {"x_buffers": []} | change
    with pytest.raises(RuntimeError, match=message):
        ops.grouped_linear(**arguments, dtype=torch.float32, w_buffers=[], main_grad=[])


@pytest.mark.parametrize(
    ("recipe", "given", "message"),
    [
        ("mxfp8_requantized", {"x_buffers": 6}, "x is given quantized, but backward=requantized starts from x itself"),
        (
            "mxfp8_high_precision",
            {"x_buffers": 6},
            "x is given quantized, but backward=high_precision starts from x itself",
        ),
        ("mxfp8", {"x_buffers": 3}, "x is given without columnwise_data, which the gradient of w needs"),
        ("mxfp8", {"w_buffers": 3}, "w is given without columnwise_data, which the gradient of x needs"),
    ],
)
def test_operands_that_backward_cannot_use_are_refused(recipe, given, message):
    x, w, _ = tensors(groups=2)
    offsets = torch.tensor([4, 8])
    lists = {"x_buffers": [], "w_buffers": [], "main_grad": []}
    for name, count in given.items():
        each = [*ops.grouped_quantize(x.detach(), offsets, "mxfp8", False)]
        each += ops.grouped_quantize(x.detach(), offsets, "mxfp8", True)
        if name == "w_buffers":
            each = [
                torch.cat([ops.quantize(one.detach(), "mxfp8", True, True)[i].flatten() for one in w]) for i in range(6)
            ]
        lists[name] = [each[i] if i < count else None for i in range(6)]
    with pytest.raises(RuntimeError, match=f"linear: {message}"):
        ops.grouped_linear(x, w, [], offsets, RECIPES[recipe], torch.float32, **lists)


@pytest.mark.parametrize("count", [0, 5, 7, 12])
def test_a_wrong_number_of_weights_in_backward_is_refused(count):
    x, w, _ = tensors(grad=False)
    offsets, text = torch.tensor([4, 4, 8]), RECIPES["mxfp8"]
    y, *saved = ops.linear_fwd(x, w, [], offsets, 24, text, torch.float32, 3, [], [])
    buffers = [ops.quantize(w[0], "mxfp8", True, True)[i % 6] for i in range(count)]
    with pytest.raises(RuntimeError, match=f"linear_bwd: w must be given as the six .* got {count}"):
        ops.linear_bwd(y, offsets, *saved[:3], buffers, 32, text, torch.float32, 3)
    of_w = ([w[0]] * count, [])
    message = f"w must be one tensor for each of the 3 groups.* got {count}" if count else "w is absent; pass it"
    with pytest.raises(RuntimeError, match=f"linear_unquantized_bwd: {message}"):
        ops.linear_unquantized_bwd(y, offsets, x, *of_w, 32, "", torch.float32, 7)


#: Every kind of buffer: families, orders, tiles.
LAYOUTS = ["fp8_tensor", "fp8_row", "fp8_block", "fp8_block:128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4:rht"]
LAYOUTS += ["mxfp8:swizzled", "nvfp4:rht:swizzled", "mxfp8:interleaved", "nvfp4:interleaved"]
every_layout = pytest.mark.parametrize("spec", LAYOUTS)


def buffers_of(x, spec, columnwise):
    return ops.quantize(x, spec, not columnwise, columnwise)[3 * columnwise : 3 * columnwise + 3]


@every_layout
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("k", [32, 48, 128, 256])
def test_groups_begin_where_the_contract_says_whatever_their_tokens(device, spec, columnwise, k):
    packed = "fp4" in spec
    unit = k // 2 if packed and not columnwise else 8 * k if "rht" in spec and columnwise else k
    sizes = [3, 0, 1, 40, 17, 128, 2]
    x = torch.randn(sum(sizes), k).to(device)
    got = ops.grouped_quantize(x, torch.tensor(sizes).cumsum(0).to(device), spec, columnwise)
    begins = [0, 0, 0]
    for part in x.split(sizes):
        assert begins[0] % unit == 0
        assert "swizzled" not in spec or begins[1] % 512 == 0
        for i, own in enumerate(buffers_of(part, spec, columnwise)):
            flat = got[i].flatten()[begins[i] :]
            if len(part) > 0:
                assert torch.equal(flat[: own.numel()].cpu(), own.flatten().cpu())
            begins[i] += own.numel()
    assert (unit % 16 == 0) == (k % (32 if packed and not columnwise else 16) == 0)  # what asynchronous copies take


#: quire.dequantize gives no values of x where these were transformed along the tokens.
DECODED = [(spec, columnwise) for spec in LAYOUTS for columnwise in (False, True) if not (columnwise and "rht" in spec)]


@pytest.mark.parametrize(("spec", "columnwise"), DECODED)
@pytest.mark.parametrize("tokens", [3, 17, 40])
def test_zero_rows_at_the_end_of_a_group_change_no_value_of_its_other_rows(device, spec, columnwise, tokens):
    x = torch.randn(tokens, 48)
    padded = torch.cat([x, torch.zeros(-tokens % 128, 48)])
    usage = {"rowwise": not columnwise, "columnwise": columnwise}
    values = [quire.quantize(t.to(device), spec, **usage).dequantize().cpu() for t in (x, padded)]
    assert torch.equal(values[0], values[1][:tokens]) and not values[1][tokens:].any()
