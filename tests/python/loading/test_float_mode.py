"""Every operator gives the same bits whatever floating-point mode its caller is in (numerics.md 0.7)."""

import contextlib
import ctypes

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import quire
from every_recipe import DEFAULTS, linear_specs
from quire import recipe, runners
from quire_torch import one_group

pytestmark = pytest.mark.alone

ops = torch.ops.quire
libm = ctypes.CDLL("libm.so.6")
#: How a thread rounds: x86's numbers for fesetround, which C leaves to the machine.
ROUNDINGS = {"down": 0x400, "up": 0x800, "to zero": 0xC00}
MODES = ["flush to zero", *ROUNDINGS]


@contextlib.contextmanager
def float_mode(name):
    if name == "flush to zero" and not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals to zero")
    if name in ROUNDINGS and libm.fesetround(ROUNDINGS[name]) != 0:
        pytest.skip("this CPU has other rounding modes")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        libm.fesetround(0)


def copied(values):
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), values)


class Calls(TorchDispatchMode):
    """The calls of quire's operators: operator, arguments before, arguments and results after."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = copied((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func.namespace == "quire":
            self.calls.append((func, before, copied((args, result))))
        return result


def same_bits(a, b):
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def values(*sizes, seed=0, scale=1.0):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)) * scale


# --- What is called. `scale`: of the values; 3e-39 makes most of them subnormal in float32.

SPECS = [
    "fp8_tensor", "fp8_tensor:pow2", "fp8_row:e5m2", "fp8_block", "fp8_block:128x128:pow2", "mxfp8", "mxfp8:32x32:e5m2",
    "mxfp4", "nvfp4", "nvfp4:16x16", "nvfp4:rht:sr", "nvfp4:row_scaled", "nvfp4:16x16:4over6=mse",
]  # fmt: skip
NVFP4 = recipe.NVFP4BlockScaling
RECIPES = linear_specs(*DEFAULTS, "nvfp4_4over6", "custom").values()
WAYS = [f"x=mxfp8,w=mxfp8,dy=mxfp8,dx=mxfp8:e5m2,backward={way}" for way in ("dequantized", "high_precision")]


def quantizers(scale):
    x = values(24, 64, scale=scale)
    for spec in SPECS:
        six = ops.quantize(x, spec, True, True)
        ops.dequantize(*six[:3], spec, False, [24, 64], torch.float32)
        ops.dequantize(*six[3:], spec, True, [24, 64], torch.bfloat16)
        ops.reorder(*six[:3], spec, False, [24, 64])
        offsets = torch.tensor([7, 24])
        ops.grouped_dequantize(*ops.grouped_quantize(x, offsets, spec, False), offsets, spec, [24, 64], torch.float32)
    ops.quantize(x, "fp8_tensor", True, True, 0, 0, torch.tensor([0.7 if scale == 1 else 3e38]))
    for spec in ("fp8_tensor", "fp8_row", "nvfp4:rht"):
        ops.quantize(x, spec, True, True, 0, 0, None, *ops.amax(x, spec, True, True))
        ops.grouped_amax(x, torch.tensor([7, 24]), spec, True)
    ops.quantize_through(x, "mxfp8", True, True)
    ops.empty_quantized(x, "mxfp8", True, True)
    ops.fingerprint(x)


def gradients_apart(scale):
    x, w, dy = values(24, 64, scale=scale), values(40, 64, seed=1, scale=scale), values(24, 40, seed=2, scale=scale)
    for text in RECIPES:
        specs = dict(part.split("=", 1) for part in text.split(",")[:3])
        of_x, of_w, of_dy = (
            ops.quantize(t, specs[role], True, True, 5) for role, t in (("x", x), ("w", w), ("dy", dy))
        )
        ops.linear_dgrad(*of_dy[:3], of_w, [24, 64], 40, text, torch.float32)
        ops.linear_wgrad(*of_dy[3:], *of_x[3:], 24, 40, 64, text, torch.bfloat16)


def linears(scale):
    leaves = [values(24, 64, scale=scale), values(40, 64, seed=1, scale=scale), values(40, seed=2, scale=scale)]
    for text in [*RECIPES, *WAYS]:
        for into in (None, torch.float32, torch.bfloat16):
            x, w, bias = (t.clone().requires_grad_() for t in leaves)
            main_grad = None if into is None else w.detach().to(into)
            state = {"sr_state": torch.tensor([7, 3]), "main_grad": main_grad}
            y = one_group.linear(x, w, bias, text, torch.float32, **state)
            y.backward(y.detach())
        ops.linear(*leaves, text, torch.bfloat16, torch.tensor([7, 3]))


def grouped(scale):
    offsets = torch.tensor([7, 24])
    leaves = [values(24, 64, scale=scale), *(values(40, 64, seed=s, scale=scale) for s in (1, 2))]
    for text in ["", *RECIPES]:
        for into in (None, torch.float32, torch.bfloat16):
            x, *w = (t.clone().requires_grad_() for t in leaves)
            bias = [t.detach()[:, 0].clone().requires_grad_() for t in w]
            main_grad = [] if into is None else [t.detach().to(into) for t in w]
            y, *_ = ops.grouped_linear(
                x, w, bias, offsets, text, torch.float32, [], [], main_grad, None, torch.tensor([7, 3])
            )
            y.backward(y.detach())


def producers(scale):
    eps = 0.1 if scale == 1 else 1e-41
    for kind in ("LayerNorm", "RMSNorm"):
        for spec in ("", "mxfp8", "fp8_tensor"):
            x, weight, bias = (values(*n, scale=scale).requires_grad_() for n in ((24, 64), (64,), (64,)))
            given = bias if kind == "LayerNorm" else None
            y, *_ = ops.norm(x, weight, given, kind, eps, False, torch.float32, spec, bool(spec), bool(spec), True)
            y.sum().backward()
    for text in ("gelu", "swiglu", "relu", "srelu", "clamped_swiglu:limit=3:alpha=1.7:glu_linear_offset=1"):
        for spec in ("", "nvfp4"):
            x = values(24, 64, scale=scale).requires_grad_()
            y, *_ = ops.activation(x, text, torch.float32, spec, bool(spec), bool(spec), True)
            (y * y.detach()).sum().backward()


def mixtures(scale):
    logits = values(24, 8, scale=scale)
    for text in ("softmax:topk=2", "softmax:topk=3:after_topk", "sigmoid:topk=2:renormalize:scaling_factor=2.3",
                 "sqrtsoftplus:topk=2:num_groups=4:group_topk=2"):  # fmt: skip
        leaf = logits.clone().requires_grad_()
        weights, ids = ops.route(leaf, values(8, seed=4), text)
        (weights * values(*weights.shape, scale=scale)).sum().backward()
        row_map, _ = ops.expert_rows(ids, 8)
        x, weights = values(24, 64, scale=scale).requires_grad_(), weights.detach().requires_grad_()
        y = ops.permute(x, row_map, weights, weights.numel())
        ops.unpermute(y, row_map, None).sum().backward()
        ops.unpermute(y.detach().requires_grad_(), row_map, weights).sum().backward()
        ops.limit_capacity(ids, 8, 4)
    ops.chunk_rows(torch.tensor([10, 14]), None, 16, 48)


def states(scale):
    amax, rule, usage = values(3, scale=scale).abs(), torch.tensor(3), torch.zeros(3, dtype=torch.int64)
    ops.amax_max_(amax.clone() * 0.1, amax[:1], 1)
    ops.delayed_collect_(amax.clone() * 0.1, usage, rule, amax[:1], amax[1:2])
    rules = torch.tensor([[3, 4, 0, 2, 448.3, 57344]], dtype=torch.float64)
    history = values(4, 3, seed=1, scale=scale).abs()
    ops.delayed_update_([history], [torch.ones(3)], [amax.clone()], [usage], [], rules, False)
    ops.debug_delayed_update(history, torch.ones(3), amax, "max", 448.3, 2)
    for dtype in (torch.float32, torch.bfloat16):
        w = values(40, 64, scale=scale)
        ops.accumulate_(w.to(dtype), w * 1.1)
        ops.grouped_accumulate_([w.to(dtype), (w * 2).to(dtype)], torch.stack([w * 1.1, w * 1.3]))
    ops.sr_advance_(torch.tensor([7, 3]))
    ops.debug_cast(values(24, 64, scale=scale), "e4m3")
    ops.debug_rht(values(24, 64, scale=scale), True)
    ops.debug_philox(torch.arange(3), 1, 2)
    ops.debug_unswizzle(ops.debug_swizzle(torch.arange(30, dtype=torch.uint8).reshape(6, 5)), 6, 5)


#: They stay registered as long as their calls are repeated.
_registered = []


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_registered():
    yield
    _recorded.clear()
    while _registered:
        _registered.pop().close()


def served(scale):
    x, name = values(24, 64, scale=scale).bfloat16(), f"float mode {scale}"
    made = runners.LinearRunner(values(40, 64, scale=scale), bias=values(40, scale=scale), input_scale=0.3 * scale)
    _registered.append(runners.register(made, name=name))
    for which in (_registered[-1], name):
        quire.nvfp4_linear(x, which, 40)
    stacks = values(4, 32, 64, scale=scale), values(4, 64, 16, seed=1, scale=scale)
    weights, ids = values(24, 2, scale=scale), torch.arange(48, dtype=torch.int32).reshape(24, 2) % 4
    made = runners.MoERunner(*stacks, w13_input_scale=0.3 * scale)
    _registered.append(runners.register(made, name=f"moe of {name}"))
    for which in (_registered[-1].handle, f"moe of {name}"):
        ops.nvfp4_moe(x, weights, ids, which, 64)
        ops.nvfp4_moe_routed(x, values(24, 4, scale=scale), None, "softmax:topk=2", which, 64)


SCENES = [quantizers, gradients_apart, linears, grouped, producers, mixtures, states, served]

#: Operators that compute nothing in floating point.
WITHOUT_NUMBERS = {
    "absence_of", "activations", "agree_", "agree_on_", "canonical_parallel", "canonical_recipe", "canonical_spec",
    "compare_fields", "compare_ranks",
    "debug_count", "debug_count_for", "debug_counted", "debug_record", "debug_recorded", "debug_recorded_text",
    "delayed_collections", "delayed_update_in_python_", "explain_begin", "explain_end", "explain_note",
    "forget_agreed", "in_backward",
    "isas", "kernel_tables", "next_caller", "raise_reported", "saved_states", "sent_by_gloo",
    "runner_call_python", "runner_dropped_functions", "runner_list", "runner_register_linear", "runner_register_moe",
    "runner_register_python", "runner_take", "runner_unregister", "spec_families", "spec_grammar", "tie",
    "wgrad_drop", "wgrad_stash_", "wgrad_take_",
}  # fmt: skip
#: Operators that are others of the list, which autograd finds.
COMPOSED = {
    "activation", "grouped_linear", "linear_prequantized", "norm", "parallel_grouped_linear", "parallel_linear",
    "permute", "quantize_weight_part", "route", "sum_gradient", "unpermute",
}  # fmt: skip
_recorded = {}


def recorded(scene, scale):
    """The operators' calls in a scene, in the mode of every process."""
    if (scene, scale) not in _recorded:
        with Calls() as made:
            scene(scale)
        _recorded[scene, scale] = [call for call in made.calls if call[0]._opname not in WITHOUT_NUMBERS]
    return _recorded[scene, scale]


def differs(func, before, after):
    args, kwargs = copied(before)
    with torch.no_grad():
        result = func(*args, **kwargs)
    pairs = zip(tree_leaves((args, result)), tree_leaves(after), strict=True)
    return not all(same_bits(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


@pytest.mark.slow
def test_every_operator_is_called_or_has_no_numbers():
    called = {call[0]._opname for scene in SCENES for scale in (1.0, 3e-39) for call in recorded(scene, scale)}
    known = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("quire::")}
    assert known == {f"quire::{name}" for name in called | WITHOUT_NUMBERS | COMPOSED}


@pytest.mark.parametrize("scale", [1.0, 3e-39], ids=["", "subnormal"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_no_operator_depends_on_the_mode_of_its_caller(mode, scene, scale):
    different = set()
    for func, before, after in recorded(scene, scale):
        with float_mode(mode):
            if differs(func, before, after):
                different.add(f"{func} {[a for a in before[0] if isinstance(a, str)]}")
    assert different == set()


#: Texts whose numbers come out differently where their digits are divided in another mode, and their canonical form.
TEXTS = {
    "fp8_tensor:eps=8e-3": "fp8_tensor:eps=0.008",
    "fp8_tensor:eps=83e-6": "fp8_tensor:eps=8.3e-05",
    "fp8_row:eps=4378140155357967e-58": "fp8_row:eps=4.37e-43",
}


@pytest.mark.parametrize("mode", MODES)
def test_numbers_in_texts_do_not_depend_on_the_mode_of_who_reads_them(mode):
    with float_mode(mode):
        found = [ops.canonical_spec(text) for text in TEXTS]
    assert found == list(TEXTS.values())


@pytest.mark.parametrize("mode", MODES)
def test_operators_do_not_depend_on_the_mode_in_which_their_text_was_first_read(mode):
    x, zeros = values(4, 64) * 1e-9, "0" * MODES.index(mode)  # a text of its own for each mode: it is read once

    def results(digits):
        return [
            ops.quantize(x, f"fp8_tensor:eps={digits}", True, False)[1],
            ops.activation_fwd(x + 1, f"clamped_swiglu:limit={digits}", torch.float32)[0],
            ops.route_fwd(x, None, f"softmax:topk=2:scaling_factor={digits}")[0],
        ]

    for digits, canonical in (("8.0{}e-3", "0.008"), ("83.0{}e-6", "8.3e-05")):
        with float_mode(mode):
            found = results(digits.format(zeros))
        assert all(map(same_bits, found, results(canonical)))


@pytest.mark.parametrize("mode", MODES)
def test_a_runner_that_is_registered_in_another_mode_computes_the_same(mode):
    x, w = values(24, 64).bfloat16(), values(40, 64)

    def results(mode):
        with float_mode(mode):
            runner = runners.register(runners.LinearRunner(w, input_scale=0.3))
        with runner:
            return quire.nvfp4_linear(x, runner, 40)

    assert same_bits(results(mode), results("to nearest"))
