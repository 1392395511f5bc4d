"""What a refused call leaves behind: nothing. And tensors whose memory is not plain, or that were put together by
hand."""

import re

import pytest
import torch

import quire
from pairwise import pairwise
from quire import functional, moe
from quire import recipe as recipes
from quire_torch import one_group

MXFP8 = "x=mxfp8,w=mxfp8,dy=mxfp8"
X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))

# ---------------------------------------------------------------- the gradient of a weight that goes elsewhere

FUSED = {"fuse_wgrad_accumulation": True}
LAYERS = {
    "Linear": lambda: quire.Linear(32, 16, **FUSED),
    "LayerNormLinear": lambda: quire.LayerNormLinear(32, 16, **FUSED),
    "LayerNormMLP": lambda: quire.LayerNormMLP(32, 64, **FUSED),
    "LayerNormMLP, checkpointed": lambda: quire.LayerNormMLP(32, 64, checkpoint=True, **FUSED),
    "GroupedLinear": lambda: quire.GroupedLinear(2, 32, 16, **FUSED),
}


def with_main_grads(name):
    layer = LAYERS[name]()
    for weight_name in layer.weight_names:
        weight = getattr(layer, weight_name)
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    return layer


def memory(layer):
    """What a call may leave with a layer."""
    flags = [getattr(layer, name).grad_added_to_main_grad for name in layer.weight_names]
    return [*flags, *[value for name, value in vars(layer).items() if "microbatch_weight" in name]]


def call(layer, x, **options):
    splits = ([2, 2],) if isinstance(layer, quire.GroupedLinear) else ()
    return layer(x, *splits, **options)


@pytest.mark.parametrize(("name", "delayed", "compiled"), pairwise(list(LAYERS), [False, True], [False, True]))
def test_a_refused_call_does_not_say_that_a_gradient_was_added_and_keeps_no_codes(name, delayed, compiled, compiler):
    layer = with_main_grads(name)
    function = compiler(lambda x: call(layer, x, is_first_microbatch=True)) if compiled else None
    recipe = recipes.DelayedScaling() if delayed else recipes.MXFP8BlockScaling()
    with quire.autocast(recipe=recipe), pytest.raises((RuntimeError, ValueError)):
        (function or (lambda x: call(layer, x, is_first_microbatch=True)))(torch.ones(4, 31))
    assert not any(memory(layer))
    with quire.autocast(recipe=recipe):
        (function or (lambda x: call(layer, x, is_first_microbatch=True)))(X).sum().backward()
    assert all(value is not None and value is not False for value in memory(layer))
    assert all(getattr(layer, name).main_grad.any() for name in layer.weight_names)


@pytest.mark.parametrize(
    "main_grad",
    [
        None,
        3,
        torch.zeros(16, 31),
        torch.zeros(32, 16).t(),
        torch.zeros(16, 32).double(),
        torch.zeros(16, 32).to_sparse(),
    ],
    ids=["none", "a number", "another shape", "not contiguous", "float64", "sparse"],
)
@pytest.mark.parametrize("delay", [False, True], ids=["now", "in backward_dw"])
def test_a_main_grad_that_does_not_fit_is_refused_before_anything_is_lost(main_grad, delay):
    layer = quire.Linear(32, 16, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.zeros(16, 32), False
    if delay:
        with quire.autocast():
            layer(X).sum().backward()
    layer.weight.main_grad = main_grad
    with quire.autocast(), pytest.raises(RuntimeError, match="needs weight.main_grad, a contiguous .* got "):
        layer.backward_dw() if delay else layer(X)
    assert layer.weight.grad_added_to_main_grad is delay
    layer.weight.main_grad = torch.zeros(16, 32)
    if delay:
        layer.backward_dw()  # the operands are still kept
        assert layer.weight.main_grad.any()


@pytest.mark.parametrize(
    "state, words",
    [
        ({"sr_state": torch.zeros(3, dtype=torch.int64)}, "sr_state must be a contiguous int64 [2] tensor"),
        ({"bwd_scale": torch.ones(1)}, "bwd_scale must be a contiguous float32 [2] tensor {dy, dx}, got Float [1]"),
        ({"bwd_scale": torch.ones(2), "bwd_amax": torch.ones(2).double()}, "bwd_amax must be a contiguous float32 [2]"),
        ({"bwd_amax": torch.ones(2)}, "bwd_amax is given without bwd_scale; pass both"),
        ({"wgrad_stash": torch.zeros(2)}, "wgrad_stash must be a contiguous int64 [2] tensor {number, count}"),
        (
            {"main_grad": torch.zeros(16, 31)},
            "each main_grad must be contiguous float32, float16 or bfloat16 of w's shape [16, 32], got Float [16, 31]",
        ),
        ({"main_grad": torch.zeros(16, 32).int()}, "main_grad must be float32, float16 or bfloat16, got Int"),
    ],
)
def test_state_that_backward_could_not_write_is_refused_in_forward(state, words):
    w = torch.ones(16, 32, requires_grad=True)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(RuntimeError, match=re.escape(f"linear: {words}")):
        one_group.linear(X, w, None, MXFP8, torch.float32, **state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


# ---------------------------------------------------------------- tensors without plain memory

KINDS = {
    "COO": (lambda t: t.to_sparse(), ".to_dense()"),
    "CSR": (lambda t: t.to_sparse_csr(), ".to_dense()"),
    "BSR": (lambda t: t.to_sparse_bsr((2, 2)), ".to_dense()"),
    "MKLDNN": (lambda t: t.to_mkldnn(), ".to_dense()"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), ".to_padded_tensor(0)"),
    "jagged": (lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged), ".to_padded_tensor(0)"),
    "of PyTorch's quantization": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), ".dequantize()"),
}
W, BIAS = torch.ones(16, 32), torch.ones(16)
TAKE_A_TENSOR = {
    "linear, x": lambda t: functional.linear(t, W, BIAS, MXFP8, torch.float32),
    "linear, w": lambda t: functional.linear(X, t, BIAS, MXFP8, torch.float32),
    "linear, bias": lambda t: functional.linear(X, W, t, MXFP8, torch.float32),
    "linear_prequantized, x": lambda t: functional.linear_prequantized(t, W, None, MXFP8, torch.float32),
    "linear_prequantized, x_buffers": lambda t: functional.linear_prequantized(
        X, W, None, MXFP8, torch.float32, x_buffers=[t] * 6
    ),
    "grouped_linear": lambda t: functional.grouped_linear(t, [W], [], torch.tensor([4]), MXFP8, dtype=torch.float32),
    "norm, x": lambda t: functional.norm(t, X[0], None, "RMSNorm", torch.float32),
    "norm, weight": lambda t: functional.norm(X, t, None, "RMSNorm", torch.float32),
    "activation": lambda t: functional.activation(t, "gelu", torch.float32),
    "quantize": lambda t: quire.quantize(t, "mxfp8"),
    "quantize_": lambda t: quire.quantize(X, "mxfp8").quantize_(t),
    "fingerprint": functional.fingerprint,
    "from_buffers": lambda t: quire.QuantizedTensor.from_buffers({"rowwise_data": t}, "mxfp8", (4, 32)),
    "nvfp4_linear": lambda t: quire.nvfp4_linear(t, 1, 16),
    "route": lambda t: moe.route(t, topk=2),
    "permute": lambda t: moe.permute(t, torch.zeros(4, 1, dtype=torch.int32), 2),
    "LayerNorm": quire.LayerNorm(32),
    "RMSNorm": quire.RMSNorm(32),
    "Linear": quire.autocast()(quire.Linear(32, 16)),
    "Linear, delayed": quire.autocast(recipe=recipes.DelayedScaling())(quire.Linear(32, 16)),
    "LayerNormLinear": quire.autocast()(quire.LayerNormLinear(32, 16)),
    "LayerNormMLP": quire.autocast()(quire.LayerNormMLP(32, 64)),
    "GroupedLinear": quire.autocast()(lambda t: quire.GroupedLinear(2, 32, 16)(t, [2, 2])),
    "MoE": quire.MoE(32, 64, 2, 1),
}


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode"])
@pytest.mark.parametrize("name", TAKE_A_TENSOR)
def test_a_tensor_that_is_not_dense_is_refused_in_our_words(name, mode):
    for kind, (make, remedy) in KINDS.items():
        if mode == "inference_mode" and kind == "jagged":
            continue  # PyTorch's own class answers before any operator is asked
        guard = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]
        with guard():
            tensor = make(X.clone())
            if mode == "grad" and tensor.is_floating_point():
                tensor.requires_grad_()
            with pytest.raises((RuntimeError, TypeError)) as raised:
                TAKE_A_TENSOR[name](tensor)
        words = str(raised.value)
        dtype = "outside torch.autocast" in words and "qint8" in words  # of layers, which ask for dtypes first
        assert dtype or ("must be a dense tensor, got one " in words and remedy in words), (kind, words)


# ---------------------------------------------------------------- a QuantizedActivation that was put together by hand


def activation(spec="mxfp8", x=X, **changes):
    """What quire.quantize makes of x, with other parts."""
    q = quire.quantize(x.clone().requires_grad_(), spec, columnwise=True)
    names = quire.tensor.BUFFER_NAMES
    parts = {"carrier": q.carrier, "spec_text": q.spec_text, **dict(zip(names, q.buffers, strict=True))} | changes
    buffers = parts.get("buffers", tuple([parts[name] for name in names]))
    return quire.QuantizedActivation(parts["carrier"], buffers, parts["spec_text"])


BYTES = torch.zeros(4, 31, dtype=torch.uint8)
ABSENT = {f"columnwise_{kind}": None for kind in ("data", "scale", "amax")}
WRONG = {
    "a carrier that is a number": ({"carrier": 1.0}, "float32, float16 or bfloat16, six buffers"),
    "a carrier of integers": ({"carrier": X.int()}, "float32, float16 or bfloat16, six buffers"),
    "a carrier of another shape": ({"carrier": torch.zeros(5, 32)}, "for shape [5, 32]"),
    "a carrier of another rank": ({"carrier": torch.zeros(2, 2, 32)}, "for shape [2, 2, 32]"),
    "a carrier without dimensions": ({"carrier": torch.zeros(())}, "at least 1 dimension"),
    "five buffers": ({"buffers": (None,) * 5}, "six buffers"),
    "buffers that are none": ({"buffers": None}, "six buffers"),
    "no direction": ({"buffers": (None,) * 6}, "six buffers"),
    "a buffer that is a list": ({"rowwise_data": [1]}, "six buffers"),
    "a spec that is an object": ({"spec_text": quire.QuantSpec("mxfp8")}, "the text of a spec"),
    "a spec that is none": ({"spec_text": "mxfp9"}, "mxfp9"),
    "two specs": ({"spec_text": "mxfp8,w=mxfp4"}, "the text of a spec"),
    "another family": ({"spec_text": "fp8_block"}, "does not fit its spec"),
    "another number of bits": ({"spec_text": "mxfp4"}, "does not fit its spec"),
    "rounding that is not x's": ({"spec_text": "nvfp4:sr"}, "rounds x stochastically"),
    "codes of another shape": ({"rowwise_data": BYTES}, "rowwise_data of mxfp8 for shape [4, 32]"),
    "codes of another dtype": ({"rowwise_data": torch.zeros(4, 32)}, "rowwise_data of mxfp8 for shape [4, 32]"),
    "sparse codes": ({"rowwise_data": torch.zeros(4, 32, dtype=torch.uint8).to_sparse()}, "must be a dense tensor"),
    "strided codes": ({"rowwise_data": torch.zeros(32, 4, dtype=torch.uint8).t()}, "must be contiguous"),
    "no scales": ({"rowwise_scale": None}, "rowwise_scale of mxfp8"),
    "scales of another dtype": ({"rowwise_scale": torch.zeros(4, 1)}, "rowwise_scale of mxfp8"),
    "columnwise codes of another shape": ({"columnwise_data": BYTES}, "columnwise_data of mxfp8 for shape [4, 32]"),
    "no columnwise scales": ({"columnwise_scale": None}, "columnwise_scale of mxfp8"),
    "codes to make columnwise ones of": ({"rowwise_data": BYTES, **ABSENT}, "rowwise_data of mxfp8 for shape [4, 32]"),
}


def state_of(layer):
    return [layer.sr_state.clone(), layer.delayed.fwd_amax.clone(), layer.delayed.usage.clone()]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", WRONG)
def test_parts_that_are_no_quantized_tensor_are_refused_in_our_words(name, grad):
    changes, words = WRONG[name]
    layer = quire.Linear(32, 16)
    before = state_of(layer)
    for recipe in (recipes.MXFP8BlockScaling(), recipes.DelayedScaling()):
        wrong = activation(**changes)
        with torch.set_grad_enabled(grad), quire.autocast(recipe=recipe):
            with pytest.raises((TypeError, ValueError, RuntimeError), match=re.escape(words)):
                layer(wrong)
        assert all(torch.equal(a, b) for a, b in zip(before, state_of(layer), strict=True))


@pytest.mark.parametrize(
    "name", ["a carrier of integers", "five buffers", "another family", "no scales", *list(WRONG)[-1:]]
)
def test_parts_that_are_no_quantized_tensor_are_refused_in_a_graph(name, compiler):
    changes, words = WRONG[name]
    layer = quire.Linear(32, 16)
    before = state_of(layer)
    with quire.autocast(), pytest.raises(Exception, match=re.escape(words)):
        compiler(layer)(activation(**changes))
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(layer), strict=True))


@pytest.mark.parametrize("name", [name for name in WRONG if "columnwise" not in name and "rounding" not in name])
def test_parts_that_are_no_quantized_tensor_are_not_decoded(name):
    changes, words = WRONG[name]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        activation(**changes).dequantize()
    assert words in str(raised.value) or "shape" in str(raised.value), raised.value


def test_the_values_of_a_carrier_are_never_read():
    right = activation()
    for value in (float("nan"), float("inf"), 7.0):
        carrier = torch.full((4, 32), value, requires_grad=True)
        q = activation(carrier=carrier)
        decoded = q.dequantize()
        assert torch.equal(decoded, right.dequantize())
        decoded.sum().backward()
        assert torch.equal(carrier.grad, torch.ones(4, 32))
