"""torch.library.opcheck on every operator: schema, autograd registration, fake tensors, AOT dispatch."""

import itertools

import pytest
import torch

from every_recipe import SPECS_OF_ONE_FAMILY, linear_specs
from pairwise import each_value
from quire_torch.one_group import backward, forward

RECIPES = SPECS_OF_ONE_FAMILY | linear_specs(
    *("fp8_current", "fp8_block", "mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_row_scaled", "nvfp4_4over6")
)
SHAPES = [(32,), (5, 32), (2, 3, 32), (2, 1, 3, 32), (0, 32)]
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ops = torch.ops.quire


def check(op, *args, **kwargs):
    result = torch.library.opcheck(op, args, kwargs, test_utils=UTILITIES)
    assert result == dict.fromkeys(UTILITIES, "SUCCESS")


def sr_state():
    return torch.tensor([7, 0])


def tensors(shape, out_features=24, dtype=torch.float32, grad=True):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=grad)
    w = torch.randn(out_features, shape[-1], dtype=dtype, requires_grad=grad)
    return x, w, torch.randn(out_features, dtype=dtype, requires_grad=grad)


@pytest.mark.parametrize(("name", "shape"), each_value(list(RECIPES), SHAPES), ids=str)
def test_linear_passes_opcheck(name, shape):
    x, w, bias = tensors(shape)
    check(ops.linear, x, w, bias, RECIPES[name], torch.float32, sr_state())


@pytest.mark.parametrize("grads", list(itertools.product([False, True], repeat=3)), ids=str)
def test_linear_passes_opcheck_whichever_arguments_need_gradients(grads):
    x, w, bias = (t.detach().requires_grad_(g) for t, g in zip(tensors((4, 32)), grads, strict=True))
    check(ops.linear, x, w, bias, RECIPES["nvfp4"], torch.float32, sr_state())


@pytest.mark.parametrize("name", RECIPES)
def test_linear_without_bias_and_with_strided_input_passes_opcheck(name):
    x, w, _ = tensors((6, 64), dtype=torch.bfloat16)
    check(
        ops.linear,
        x.detach()[::2, 32:].requires_grad_(),
        w[:, :32].detach().requires_grad_(),
        None,
        RECIPES[name],
        torch.bfloat16,
        sr_state(),
    )
    transposed = torch.randn(32, 6).t().requires_grad_()
    check(ops.linear, transposed, w[:, :32].float().detach(), None, RECIPES[name], torch.float32, sr_state())


@pytest.mark.parametrize(("name", "shape"), each_value(list(RECIPES), SHAPES), ids=str)
def test_inner_operators_pass_opcheck(name, shape):
    x, w, bias = tensors(shape, grad=False)
    check(ops.linear_fwd, *forward(x, w, bias, RECIPES[name], 3))
    y, *saved = ops.linear_fwd(*forward(x, w, bias, RECIPES[name], 3))
    check(ops.linear_bwd, *backward(y, saved, shape[-1], RECIPES[name], 7, sr_state()))
    check(ops.linear_bwd, *backward(y, saved, shape[-1], RECIPES[name], 13, sr_state()))
    *_, dy_data, dy_scale, dy_amax = ops.linear_bwd(*backward(y, saved, shape[-1], RECIPES[name], 8, sr_state()))
    tokens = x.numel() // shape[-1]
    main_grad = torch.ones(24, shape[-1])
    check(ops.wgrad_, main_grad, dy_data, dy_scale, dy_amax, *saved[:3], None, tokens, RECIPES[name])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_have_the_shapes_of_what_they_are_of(shape, device):
    given = [tensor.to(device) for tensor in tensors(shape, grad=False)]
    y, *saved = ops.linear_fwd(*forward(*given, RECIPES["mxfp8"], 3))
    found = ops.linear_bwd(*backward(y, saved, shape[-1], RECIPES["mxfp8"], 7))[:3]
    # Autograd would sum a gradient of another rank to the right one without a word.
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in given]


@pytest.mark.parametrize(("name", "shape"), each_value(list(RECIPES), [(2, 3, 32), (0, 32)]), ids=str)
def test_linear_of_given_operands_and_state_passes_opcheck(name, shape):
    x, w, bias = tensors(shape)
    specs = dict(part.split("=", 1) for part in RECIPES[name].split(","))
    w_buffers = list(ops.quantize(w.detach(), specs["w"], True, True))
    check(ops.linear_prequantized, x, w, bias, RECIPES[name], torch.float32, [], w_buffers, sr_state=sr_state())
    arguments = (x, [w], [bias], None, RECIPES[name], torch.float32, [], w_buffers, [torch.ones_like(w)])
    check(ops.grouped_linear, *arguments, sr_state=sr_state())


@pytest.mark.parametrize("mode", ["requantized", "dequantized", "high_precision"])
def test_other_ways_backward_pass_opcheck(mode):
    x, w, bias = tensors((2, 3, 32))
    text = f"{RECIPES['mxfp8']},dx=mxfp8:e5m2,backward={mode}"
    check(ops.linear_prequantized, x, w, bias, text, torch.float32, [], [])
    arguments = (x, [w], [bias], None, text, torch.float32, [], [], [])
    check(ops.grouped_linear, *arguments, wgrad_stash=torch.tensor([12345, 0]))
    ops.wgrad_drop(12345)


def test_delayed_scaling_passes_opcheck():
    x, w, bias = tensors((2, 3, 32))
    text = "x=fp8_tensor,w=fp8_tensor,dy=fp8_tensor:e5m2,dx=fp8_tensor:e5m2"
    scale, amax = torch.tensor([2.0, 4.0]), torch.zeros(2)
    arguments = (x, [w], [bias], None, text, torch.float32, [], [], [])
    check(ops.grouped_linear, *arguments, fwd_scale=torch.ones(3), bwd_scale=scale, bwd_amax=amax)


SPECS = ["fp8_tensor", "fp8_row:e5m2", "fp8_block:128x128", "mxfp8", "mxfp4", "nvfp4:rht:sr", "nvfp4:16x16"]
SPECS += ["mxfp8:swizzled", "nvfp4:rht:interleaved"]


@pytest.mark.parametrize(("spec", "shape"), each_value(SPECS, SHAPES), ids=str)
def test_quantize_and_dequantize_pass_opcheck(spec, shape):
    x, _, _ = tensors(shape, grad=False)
    check(ops.quantize, x, spec, True, True, 3, 4)
    check(ops.empty_quantized, x, spec, True, False)
    row, row_scale, row_amax, column, column_scale, column_amax = ops.quantize(x, spec, True, True, 3, 4)
    check(ops.dequantize, row, row_scale, row_amax, spec, False, list(shape), torch.bfloat16)
    check(ops.dequantize, column, column_scale, column_amax, spec, True, list(shape), torch.float32)
    if "swizzled" not in spec:
        check(ops.reorder, row, row_scale, row_amax, spec, False, list(shape))
        check(ops.reorder, column, column_scale, column_amax, spec, True, list(shape))


def test_state_and_debug_operators_pass_opcheck():
    x, _, _ = tensors((5, 32), grad=False)
    check(ops.sr_advance_, sr_state())
    check(ops.fingerprint, x)
    check(ops.quantize_through, x, "mxfp8", True, True)
    check(ops.quantize_through, x.clone().requires_grad_(), "nvfp4", True, True)
    check(ops.amax_max_, torch.zeros(3), torch.ones(1), 1)
    check(ops.accumulate_, torch.zeros(3, 4), torch.ones(3, 4), False)
    check(ops.wgrad_stash_, torch.tensor([54321, 0]), [x, x], 5, RECIPES["mxfp8"])
    ops.wgrad_drop(54321)
    check(ops.debug_cast, x, "e4m3")
    check(ops.debug_rht, x, True)
    check(ops.debug_swizzle, torch.arange(30, dtype=torch.uint8).reshape(6, 5))
    check(ops.debug_unswizzle, torch.zeros(128, 8, dtype=torch.uint8), 6, 5)
    check(ops.debug_philox, torch.arange(3), 1, 2)
    amax, usage, rule = torch.rand(1), torch.tensor([3, 0, 0]), torch.tensor(3)
    check(ops.delayed_collect_, torch.zeros(3), usage, rule, amax, amax)
    check(ops.delayed_collect_, torch.zeros(3), usage, rule, amax, None)
    rules = torch.tensor([[3, 4, 0, 0, 448, 57344]], dtype=torch.float64)
    states = [torch.rand(4, 3), torch.rand(6, 3)], [torch.ones(3) * 2, torch.ones(3)], [torch.rand(3), torch.rand(3)]
    for reduced in ([], [torch.rand(3), torch.rand(3)]):
        check(ops.delayed_update_, *states, [usage, usage.clone()], reduced, rules, False)
    check(ops.debug_delayed_update, torch.rand(4, 3), torch.ones(3), torch.rand(3), "max", 448.0, 0)


def test_a_result_that_is_not_what_its_fake_says_would_be_seen():
    """Negative control of the above: opcheck compares real results with fake ones."""
    library = torch.library.Library("quire_opcheck_control", "DEF")
    library.define("wrong(Tensor x) -> Tensor")
    library.impl("wrong", lambda x: x.new_empty(3), "CPU")
    library.impl("wrong", lambda x: x.new_empty(4), "Meta")
    with pytest.raises(Exception, match="test_faketensor|shape|size"):
        check(torch.ops.quire_opcheck_control.wrong, torch.ones(2))
