"""Operators of one product and of its gradients: operands given quantized, given scales, gradients of w elsewhere."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import quire
from quire import recipe
from quire.golden.comparison import unpack
from quire_torch.one_group import backward, forward, linear
from steps import assert_rounded

pytestmark = pytest.mark.any_device

ops = torch.ops.quire
MXFP8 = recipe.MXFP8BlockScaling().linear_spec()
DELAYED = "x=fp8_tensor,w=fp8_tensor,dy=fp8_tensor:e5m2"


@pytest.fixture(scope="module")
def delayed(tmp_path_factory):
    """The golden case linear/delayed_hybrid: its parameters, and a function from a tensor's name to the tensor."""
    folder = Path(os.environ.get("QUIRE_GOLDEN_DIR", "does not exist"))
    if not (folder / "manifest.json").exists():
        folder = tmp_path_factory.mktemp("golden")
        unpack(folder)
    entries = json.loads((folder / "manifest.json").read_text())["cases"]
    case = next(entry for entry in entries if entry["id"] == "linear/delayed_hybrid")

    def tensor(name):
        t = case["tensors"][name]
        array = np.fromfile(folder / t["file"], t["dtype"], int(np.prod(t["shape"])), offset=t["offset"])
        found = torch.from_numpy(array.reshape(t["shape"]))
        return found.view(torch.bfloat16) if found.dtype == torch.uint16 else found

    return case["spec"], tensor


def given(t, spec, scale):
    """The six buffers of t, cast with a given scale."""
    return list(ops.quantize(t, spec, True, True, 0, 0, scale))


@pytest.mark.cpu_only
def test_given_scales_meet_the_golden_delayed_case(delayed):
    spec, tensor = delayed
    scale = {role: torch.tensor([float(spec[f"scale_{role}"])]) for role in ("x", "w", "dy")}
    x, w, bias, dy = (tensor(name) for name in ("x", "w", "bias", "dy"))
    x.requires_grad_(), w.requires_grad_(), bias.requires_grad_()
    buffers = [given(t.detach(), "fp8_tensor", scale[role]) for role, t in (("x", x), ("w", w))]
    bwd_scale, bwd_amax = torch.cat([scale["dy"], torch.ones(1)]), torch.zeros(2)
    with quire.debug.operands() as records:
        y = linear(x, w, bias, DELAYED, torch.float32, *buffers, bwd_scale=bwd_scale, bwd_amax=bwd_amax)
        bwd_scale.fill_(1e9)  # a copy of it was taken
        y.backward(dy)
    for record in records:
        role, q = {"x": "x", "w": "w", "dy": "g"}[record.role], record.tensor
        for data, name in ((q.rowwise_data, "row"), (q.columnwise_data, "col")):
            assert torch.equal(data, tensor(f"{role}_{name}_codes"))
        assert torch.equal(q.rowwise_scale, tensor(f"{role}_row_scales"))
    for result, name, k in ((y, "y", 96), (x.grad, "dx", 32), (w.grad, "dw", 64)):
        bound = (k + 6) * 2.0**-24 * tensor(f"{name}_abs").double()
        # y is float32 and is compared as such; gradients have their tensor's dtype, one rounding more.
        rounding = 0 if result.dtype == torch.float32 else 2.0**-8 * tensor(name).double().abs()
        assert ((result.double() - tensor(name)).abs() <= bound + rounding).all()
    assert torch.equal(bwd_amax, torch.tensor([dy.abs().max().float(), 0]))
    assert_rounded(bias.grad, tensor("db"), dy.double().abs().sum(0), len(dy))


def test_amax_max_keeps_the_larger_value_and_ignores_nan():
    amax = torch.tensor([1.0, 2.0, 3.0])
    version = amax._version
    for slot, value in ((0, 5.0), (1, 1.0), (2, float("nan")), (2, float("inf"))):
        ops.amax_max_(amax, torch.tensor([value]), slot)
    assert amax.tolist() == [5.0, 2.0, float("inf")]
    assert amax._version == version  # a backward that has seen it may run after another forward
    for slot in (-1, 3):
        with pytest.raises(RuntimeError, match=rf"amax_max_: slot must be in \[0, 3\), got {slot}"):
            ops.amax_max_(amax, torch.ones(1), slot)


def buffers(t, spec):
    return list(ops.quantize(t, spec, True, True))


@pytest.mark.parametrize("name", ["mxfp8", "fp8_current", "fp8_block", "nvfp4"])
def test_operands_that_are_given_quantized_give_the_same_bits(name):
    text = recipe.from_name(name).linear_spec()
    specs = dict(part.split("=", 1) for part in text.split(","))
    x, w, dy = torch.randn(2, 5, 64), torch.randn(40, 64), torch.randn(2, 5, 40)
    results = []
    for x_buffers, w_buffers in (([], []), (buffers(x, specs["x"]), buffers(w, specs["w"]))):
        # A carrier has one element in memory, tells shape and dtype, and is never read.
        a, b = (x, w) if not x_buffers else (torch.full((), torch.nan).expand(t.shape) for t in (x, w))
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        y = linear(a, b, None, text, torch.float32, x_buffers, w_buffers, sr_state=torch.tensor([3, 0]))
        results.append([y.detach(), *torch.autograd.grad(y, (a, b), dy)])
    assert all(torch.equal(here, given) for here, given in zip(*results, strict=True))


@pytest.mark.parametrize("spec", ["fp8_tensor", "nvfp4"])
def test_only_an_amax_that_scales_nothing_may_be_absent(spec):
    text, x, w = f"x={spec},w={spec},dy={spec}", torch.randn(5, 64), torch.randn(40, 64)
    whole = buffers(w, spec)
    without = [*whole[:2], None, *whole[3:]]
    expected = linear(x, w, None, text, torch.float32, [], whole)
    if spec == "nvfp4":
        with pytest.raises(RuntimeError, match="linear: w does not fit its spec: rowwise_amax .*, got nothing"):
            linear(x, w, None, text, torch.float32, [], without)
    else:
        assert torch.equal(linear(x, w, None, text, torch.float32, [], without), expected)


def test_given_buffers_that_do_not_fit_are_refused_in_words():
    x, w = torch.randn(5, 64), torch.randn(40, 64, requires_grad=True)
    xq = buffers(x[:4], "mxfp8")
    with pytest.raises(
        RuntimeError, match=r"linear: x does not fit its spec: rowwise_data of mxfp8:nan .*\[5, 64\], got .*\[4, 64\]"
    ):
        linear(x, w.detach(), None, MXFP8, torch.float32, xq, [])
    with pytest.raises(RuntimeError, match="linear: x's buffers must be the six of quire.TensorProto, got 2"):
        linear(x, w.detach(), None, MXFP8, torch.float32, xq[:2], [])
    rowwise = [*buffers(x, "mxfp8")[:3], None, None, None]
    assert linear(x, w.detach(), None, MXFP8, torch.float32, rowwise, []).shape == (5, 40)
    with pytest.raises(RuntimeError, match="linear: x is given without columnwise_data, which the gradient of w"):
        linear(x, w, None, MXFP8, torch.float32, rowwise, [])
    for mode in ("requantized", "high_precision"):
        with pytest.raises(RuntimeError, match=f"x is given quantized, but backward={mode} starts from x itself"):
            linear(x, w, None, f"{MXFP8},backward={mode}", torch.float32, buffers(x, "mxfp8"), [])
    saved = ops.linear_fwd(*forward(x, w, None, MXFP8, 3))[1:]
    with pytest.raises(RuntimeError, match="linear_bwd: x does not fit its spec: columnwise_data"):
        ops.linear_bwd(*backward(torch.randn(6, 40), saved, 64, MXFP8, 7))
    with pytest.raises(RuntimeError, match="linear: w is absent; pass it or w_buffers"):
        ops.linear_fwd(x, [], [], None, 40, MXFP8, torch.float32, 3, [], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("mode", ["", ",backward=requantized", ",backward=dequantized", ",backward=high_precision"])
def test_the_weight_gradient_goes_into_main_grad(dtype, overwrite, mode):
    x, w, dy = torch.randn(5, 64), torch.randn(40, 64, requires_grad=True), torch.randn(5, 40)
    (dw,) = torch.autograd.grad(linear(x, w, None, MXFP8 + mode, torch.float32, [], []), w, dy)
    before = torch.randn(40, 64, dtype=dtype)
    main_grad = before.clone()
    y = linear(x, w, None, MXFP8 + mode, torch.float32, [], [], main_grad=main_grad, overwrite_main_grad=overwrite)
    assert torch.equal(main_grad, before)
    y.backward(dy)
    assert w.grad is None
    rounded = dw.to(dtype).float() if not mode or mode == ",backward=requantized" else dw
    assert torch.equal(main_grad, dw.to(dtype) if overwrite else (before.float() + rounded).to(dtype))


@pytest.mark.cpu_only
@pytest.mark.parametrize("mode", ["", ",backward=requantized", ",backward=dequantized", ",backward=high_precision"])
def test_stashed_operands_give_the_weight_gradient_later_and_in_order(mode):
    w, text = torch.randn(40, 64, requires_grad=True), MXFP8 + mode
    stash, expected = torch.tensor([987, 0]), []
    for tokens in (5, 33):
        x, dy = torch.randn(tokens, 64), torch.randn(tokens, 40)
        expected += torch.autograd.grad(linear(x, w, None, text, torch.float32, [], []), w, dy)
        linear(x, w, None, text, torch.float32, [], [], wgrad_stash=stash).backward(dy)
    assert w.grad is None and stash.tolist() == [987, 2]
    for tokens, dw in zip((5, 33), expected, strict=True):
        operands, kept_tokens, kept_text, overwrite = ops.wgrad_take_(stash)
        assert (kept_tokens, kept_text) == (tokens, text)
        later = torch.empty(40, 64)
        if len(operands) == 2:
            later = operands[0].t() @ operands[1]
        else:
            ops.wgrad_(later, *operands, None, tokens, text, True)
        assert torch.equal(later, dw)
    assert stash.tolist() == [987, 0] and ops.wgrad_take_(stash)[0] == []


def test_backward_in_high_precision_is_that_of_the_plain_tensors():
    x, w, dy = torch.randn(2, 5, 64), torch.randn(40, 64), torch.randn(2, 5, 40)
    for mode, a, b in (
        ("high_precision", x, w),
        ("dequantized", quire.quantize(x, "nvfp4").dequantize(), quire.quantize(w, "nvfp4:16x16").dequantize()),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        text = f"x=nvfp4,w=nvfp4:16x16,dy=nvfp4:sr,backward={mode}"
        y = linear(*leaves, None, text, torch.float32, [], [])
        assert torch.equal(y, ops.linear(x, w, None, "x=nvfp4,w=nvfp4:16x16,dy=nvfp4", torch.float32))
        dx, dw = torch.autograd.grad(y, leaves, dy)
        assert torch.equal(dx, dy @ b)
        assert torch.equal(dw, dy.flatten(0, 1).t() @ a.flatten(0, 1))


def test_a_requantized_input_gives_the_gradients_of_a_kept_one_and_is_saved_itself():
    x, dy = torch.randn(5, 64), torch.randn(5, 40)
    w = torch.randn(40, 64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = linear(x, w, None, f"{MXFP8},backward=requantized", torch.float32, [], [])
    assert any(t.data_ptr() == x.data_ptr() for t in saved)
    (dw,) = torch.autograd.grad(y, w, dy)
    (expected,) = torch.autograd.grad(ops.linear(x, w, None, MXFP8, torch.float32), w, dy)
    assert torch.equal(dw, expected)


def test_a_spec_for_dx_rounds_it():
    x, w, dy = torch.randn(5, 64, requires_grad=True), torch.randn(40, 64), torch.randn(5, 40)
    (plain,) = torch.autograd.grad(ops.linear(x, w, None, MXFP8, torch.float32), x, dy)
    (rounded,) = torch.autograd.grad(ops.linear(x, w, None, f"{MXFP8},dx=fp8_row:e5m2", torch.float32), x, dy)
    assert torch.equal(rounded, quire.quantize(plain, "fp8_row:e5m2").dequantize())


def test_dx_is_not_rounded_under_the_scale_of_dy():
    x, w, dy = torch.randn(5, 64, requires_grad=True), torch.randn(40, 64), torch.randn(5, 40)
    state = {"fwd_scale": torch.ones(3), "bwd_scale": torch.tensor([2.0, 0.37])}
    (plain,) = torch.autograd.grad(linear(x, w, None, DELAYED, torch.float32, **state), x, dy)
    state["bwd_amax"] = torch.zeros(2)
    y = linear(x, w, None, f"{DELAYED},dx=fp8_tensor:e5m2", torch.float32, **state)
    (rounded,) = torch.autograd.grad(y, x, dy)
    expected = quire.quantize(plain, "fp8_tensor:e5m2", scale=state["bwd_scale"][1:]).dequantize()
    assert torch.equal(rounded, expected) and not torch.equal(rounded, plain)
    assert state["bwd_amax"].tolist() == [dy.abs().max(), plain.abs().max()]


@pytest.mark.cpu_only
def test_operands_that_wait_do_not_change_with_the_memory_they_came_from():
    stash, dy, x = torch.tensor([4242, 0]), torch.ones(5, 40), torch.ones(5, 64)
    ops.wgrad_stash_(stash, [dy, x], 5, "", False)
    dy.zero_(), x.zero_()  # as a compiled graph uses its memory again
    assert all(kept.all() for kept in ops.wgrad_take_(stash)[0])


def test_results_that_were_not_asked_for_are_empty():
    x, w, dy = torch.randn(5, 64), torch.randn(40, 64), torch.randn(5, 40)
    saved = ops.linear_fwd(*forward(x, w, None, MXFP8, 1))[1:]
    assert [t.numel() > 0 for t in saved] == [True, True, False, False, False, False]
    dx, dw, db, *_ = ops.linear_bwd(*backward(dy, saved, 64, MXFP8, 2))
    assert dx.numel() == 0 and dw.shape == (40, 64) and db.numel() == 0
    *nothing, dy_data, dy_scale, _ = ops.linear_bwd(*backward(dy, saved, 64, MXFP8, 8))
    assert [t.numel() for t in nothing] == [0, 0, 0]
    _, _, _, codes, scale, _ = ops.quantize(dy, "mxfp8", False, True)
    assert torch.equal(dy_data, codes.flatten()) and torch.equal(dy_scale, scale.flatten())


@pytest.mark.cpu_only
def test_codes_of_a_weight_that_has_changed_are_refused():
    x, w = torch.randn(5, 64), torch.randn(40, 64)
    codes, mark = buffers(w, "mxfp8"), ops.fingerprint(w)

    def run():
        return linear(x, w, None, MXFP8, torch.float32, [], codes, w_fingerprint=mark)

    assert torch.equal(run(), ops.linear(x, w, None, MXFP8, torch.float32))
    value = w[3, 5].item()
    w.data[3, 5] += 1  # which no version counter shows
    with pytest.raises(
        RuntimeError, match="the weight has changed since it was quantized, .* stale; .*quantize_weights"
    ):
        run()
    w.data[3, 5] = value
    run()


def test_gradients_pass_through_quantization_by_the_carrier():
    x = torch.randn(5, 64, requires_grad=True)
    carrier, *codes = ops.quantize_through(x, "mxfp8", True, True)
    assert carrier.shape == x.shape and carrier.untyped_storage().nbytes() == 4
    assert all(torch.equal(a, b) for a, b in zip(codes, buffers(x.detach(), "mxfp8"), strict=True))
    dy = torch.randn(5, 64)
    (dx,) = torch.autograd.grad(carrier, x, dy)
    assert torch.equal(dx, dy)


@pytest.mark.parametrize("mode", ["", ",backward=high_precision"])
def test_a_placeholder_is_what_w_gets_when_its_gradient_went_elsewhere(mode):
    x, w, main_grad = torch.randn(5, 64), torch.randn(40, 64, requires_grad=True), torch.zeros(40, 64)
    y = linear(x, w, None, MXFP8 + mode, torch.float32, [], [], main_grad=main_grad, placeholder=True)
    y.sum().backward()
    assert torch.equal(w.grad, torch.zeros(40, 64)) and main_grad.count_nonzero() > 0
