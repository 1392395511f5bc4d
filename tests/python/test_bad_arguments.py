"""Arguments of a wrong kind, everywhere but in a layer's forward pass: refused in words that say what was expected."""

import math
import re

import numpy
import pytest
import torch

import quire
from quire import recipe as recipes

X, META = torch.ones(4, 32), torch.ones(4, 32, device="meta")
BYTES = torch.zeros(128, 4, dtype=torch.uint8)


def q(spec="mxfp8", **options):
    return quire.quantize(X, spec, **options)


def layer():
    return quire.Linear(32, 16)


def entered(context):
    with context:
        pass


def tokens(call):
    with quire.autocast():
        return call()


# What is done, its exception, and words that must be in it.
CASES = {
    "quantize a list": (lambda: quire.quantize([1.0], "mxfp8"), TypeError, "quantize: x must be a tensor, got [1.0]"),
    "quantize with a seed that is text": (lambda: q("nvfp4:sr", seed="1"), TypeError, "seed must be an int, got '1'"),
    "a mixture of a number": (lambda: quire.MoE(32, 32, 2)(3), TypeError, "quire.MoE: x must be a tensor, got 3"),
    "a layer that torch.fx traces": (
        lambda: torch.fx.symbolic_trace(torch.nn.Sequential(layer())),
        TypeError,
        "take torch.export, or a Tracer whose is_leaf_module() is true",
    ),
    "loads of no ids": (lambda: quire.moe.tokens_per_expert(3, 2), TypeError, "topk_ids must be a tensor, got 3"),
    "scores of no logits": (lambda: quire.moe.scores([1.0]), TypeError, "scores: logits must be a tensor, got [1.0]"),
    "experts without number": (
        lambda: torch.ops.quire.limit_capacity(torch.zeros(4, 2, dtype=torch.int32), 2**62, 1),
        RuntimeError,
        "route (limit_capacity): num_experts must be from 1 to 1048576, got 4611686018427387904",
    ),
    "gradients of bits": (
        lambda: torch.ops.quire.accumulate_(torch.zeros(2, 2), BYTES[:2, :2].view(torch.bits8)),
        RuntimeError,
        "accumulate_: value must be float32, float16 or bfloat16",
    ),
    "scales of no state": (lambda: quire.delayed.scales(3), TypeError, "delayed.scales: state must be a DelayedState"),
    "amaxes into no state": (
        lambda: quire.delayed.collect("state", None, X, None),
        TypeError,
        "delayed.collect: state must be a DelayedState, got 'state'",
    ),
    "an amax into no state": (
        lambda: quire.delayed.collect_weight(None, X),
        TypeError,
        "delayed.collect_weight: state must be a DelayedState, got None",
    ),
    "delayed codes of a list": (
        lambda: quire.delayed.quantize([1.0], X, 0, False),
        TypeError,
        "delayed.quantize: x must be a tensor, got [1.0]",
    ),
    "a delayed step of a text": (
        lambda: quire.delayed.enter("delayed", None),
        TypeError,
        "delayed.enter: recipe must be a DelayedScaling, got 'delayed'",
    ),
    "quantize with half an offset": (lambda: q(offset=0.5), TypeError, "offset must be an int, got 0.5"),
    "quantize with a number as scale": (lambda: q("fp8_tensor", scale=2.0), TypeError, "scale must be a tensor, got 2"),
    "quantize with a scale elsewhere": (
        lambda: q("fp8_tensor", scale=torch.ones(1, device="meta")),
        RuntimeError,
        "quantize: tensors must be on one device; got meta and cpu; give the one on meta values",
    ),
    "dequantize a plain tensor": (lambda: quire.dequantize(X), TypeError, "a plain tensor has no codes"),
    "from_buffers of None": (
        lambda: quire.QuantizedTensor.from_buffers(None, "mxfp8", (4, 32)),
        TypeError,
        "from_buffers: buffers must be a dict, got None",
    ),
    "from_buffers of lists": (
        lambda: quire.QuantizedTensor.from_buffers({"rowwise_data": [1]}, "mxfp8", (4, 32)),
        TypeError,
        "rowwise_data must be a tensor, got [1]",
    ),
    "from_buffers with an integer dtype": (
        lambda: quire.QuantizedTensor.from_buffers(q().buffers(), "mxfp8", (4, 32), torch.int8),
        ValueError,
        "dtype must be float32, float16 or bfloat16, got torch.int8",
    ),
    "a shape that is text": (
        lambda: quire.TensorProto("ab", torch.float32, "mxfp8"),
        ValueError,
        "TensorProto: shape must be a sequence of sizes, got 'ab'",
    ),
    "make_like of None": (lambda: quire.QuantizedTensor.make_like(None), TypeError, "expected a QuantizedTensor"),
    "make_like with an integer dtype": (
        lambda: quire.QuantizedTensor.make_like(q(), dtype=torch.int8),
        TypeError,
        "a dtype of float32, float16 or bfloat16; got QuantizedTensor and torch.int8",
    ),
    "quantize_ of a list": (lambda: q().quantize_([1.0]), TypeError, "values must be a tensor, got [1.0]"),
    "quantize_ of complex numbers": (lambda: q().quantize_(X + 0j), TypeError, "must be real numbers, got torch.compl"),
    "quantize_ of a tensor without values": (lambda: q().quantize_(META), TypeError, "got torch.float32 on meta"),
    "update_usage with text": (lambda: q().update_usage(True, "no"), TypeError, "columnwise_usage must be a bool, got"),
    "the memory of codes for others": (
        lambda: torch.from_dlpack(q()),
        TypeError,
        "stores codes and scales, and no val",
    ),
    "a function of each value": (lambda: q().apply_(abs), TypeError, "QuantizedTensor.apply_: it stores codes and sca"),
    "quantized_model_init with a number": (
        lambda: entered(quire.quantized_model_init(3)),
        TypeError,
        "quantized_model_init: enabled must be a bool, got 3",
    ),
    "quantized_model_init with text for a flag": (
        lambda: entered(quire.quantized_model_init(keep_master="yes")),
        TypeError,
        "keep_master must be a bool, got 'yes'",
    ),
    "quantize_weights of no model": (lambda: quire.quantize_weights(3), TypeError, "model must be a torch.nn.Module"),
    "quantize_weights with the name of no recipe": (
        lambda: quire.quantize_weights(layer(), "mxfp9"),
        ValueError,
        "there is no recipe 'mxfp9'; the recipes are nvfp4, mxfp4, mxfp8",
    ),
    "quantize_weights with an array as a recipe": (
        lambda: quire.quantize_weights(layer(), numpy.ones(2)),
        TypeError,
        "quantize_weights: recipe must be a recipe of quire.recipe, a name",
    ),
    "quantize_weights with no optimizer": (
        lambda: quire.quantize_weights(layer(), None, 3),
        TypeError,
        "optimizer must be a torch.optim.Optimizer, got 3",
    ),
    "checkpoint of a number": (lambda: quire.checkpoint(3, X), TypeError, "function must be a function, got 3"),
    "checkpoint with text for a flag": (
        lambda: quire.checkpoint(layer(), X, use_reentrant="no"),
        TypeError,
        "use_reentrant must be a bool, got 'no'",
    ),
    "delayed_state of no model": (lambda: quire.delayed_state(3), TypeError, "model must be a torch.nn.Module, got 3"),
    "set_delayed_state of a list": (
        lambda: quire.set_delayed_state(layer(), [1]),
        TypeError,
        "set_delayed_state: state must be a dict, got [1]",
    ),
    "rng_state of no model": (lambda: quire.rng_state(3), TypeError, "model must be a torch.nn.Module, got 3"),
    "set_rng_state of None": (lambda: quire.set_rng_state(layer(), None), TypeError, "state must be a dict, got None"),
    "explain a number": (lambda: quire.explain(3), TypeError, "explain: function must be a function, got 3"),
    "philox with text": (
        lambda: quire.debug.philox("x", 0, torch.arange(2)),
        TypeError,
        "seed must be an int, got 'x'",
    ),
    "an update with a largest value that is none": (
        lambda: quire.debug.delayed_update(torch.zeros(4, 3), torch.ones(3), torch.ones(3), maximum=math.nan),
        ValueError,
        "maximum must be finite and above 0",
    ),
    "an update of tensors elsewhere": (
        lambda: quire.debug.delayed_update(torch.zeros(4, 3), torch.ones(3), torch.ones(3, device="meta")),
        RuntimeError,
        "debug_delayed_update: tensors must be on one device; got meta and cpu",
    ),
    "a layout that is too small": (
        lambda: quire.debug.unswizzle(BYTES, 500, 8),
        RuntimeError,
        "holds 4096 uint8 values",
    ),
    "a norm of text": (lambda: quire.LayerNorm("x"), ValueError, "normalized_shape must be one or more sizes, got 'x'"),
    "a norm of half a size": (lambda: quire.RMSNorm(0.5), ValueError, "must be one or more sizes, got 0.5"),
    "a norm of a list": (lambda: quire.RMSNorm(4)([1.0]), TypeError, "input of a layer must be a tensor, got [1.0]"),
    "a layer that returns text": (
        lambda: quire.Linear(4, 4, return_bias="no"),
        TypeError,
        "quire.Linear: return_bias must be a bool, got 'no'",
    ),
    "a norm's layer with half a bias": (
        lambda: quire.LayerNormLinear(4, 4, bias="half"),
        TypeError,
        "quire.LayerNormLinear: bias must be a bool, got 'half'",
    ),
    "a recipe in the place of a bias": (
        lambda: quire.Linear(4, 4, "mxfp8"),
        TypeError,
        "quire.Linear: bias must be a bool, got 'mxfp8'; a recipe is passed as recipe=",
    ),
    "experts with a recipe as a bias": (
        lambda: quire.GroupedLinear(2, 4, 4, bias="mxfp8"),
        TypeError,
        "quire.GroupedLinear: bias must be a bool, got 'mxfp8'; a recipe is passed as recipe=",
    ),
    "a mixture with a recipe as a bias": (
        lambda: quire.MoE(4, 4, 4, bias="mxfp8"),
        TypeError,
        "quire.MoE: bias must be a bool, got 'mxfp8'; a recipe is passed as recipe=",
    ),
    "a device and a dtype in torch's order": (
        lambda: quire.Linear(4, 4, True, "cpu", torch.bfloat16),
        TypeError,
        "quire.Linear: params_dtype must be a torch.dtype or None, got 'cpu'; params_dtype comes before device",
    ),
    "a dtype for a device": (
        lambda: quire.LayerNormMLP(4, 4, device=torch.bfloat16),
        TypeError,
        "quire.LayerNormMLP: device must be a device or None, got torch.bfloat16",
    ),
    "a norm with a device for a dtype": (
        lambda: quire.RMSNorm(4, params_dtype="cpu"),
        TypeError,
        "quire.RMSNorm: params_dtype must be a torch.dtype or None, got 'cpu'",
    ),
    "a network that may be recomputed": (
        lambda: quire.LayerNormMLP(4, 4, checkpoint="maybe"),
        TypeError,
        "quire.LayerNormMLP: checkpoint must be a bool, got 'maybe'",
    ),
    "experts with a number for a flag": (
        lambda: quire.GroupedLinear(2, 4, 4, return_bias=1),
        TypeError,
        "quire.GroupedLinear: return_bias must be a bool, got 1",
    ),
    "a mixture with text for a flag": (
        lambda: quire.MoE(4, 4, 4, weight_on_input="no"),
        TypeError,
        "quire.MoE: weight_on_input must be a bool, got 'no'",
    ),
    "a layer initialised by a number": (
        lambda: quire.Linear(4, 4, init_method=3),
        TypeError,
        "quire.Linear: init_method must be a function, got 3",
    ),
    "a network initialised by text": (
        lambda: quire.LayerNormMLP(4, 4, output_layer_init_method="zeros"),
        TypeError,
        "quire.LayerNormMLP: output_layer_init_method must be a function, got 'zeros'",
    ),
    "a layer of half a feature": (
        lambda: quire.Linear(4, 0.5),
        TypeError,
        "quire.Linear: out_features must be an int, got 0.5",
    ),
    "a layer of fewer features than none": (
        lambda: quire.LayerNormLinear(-4, 4),
        ValueError,
        "quire.LayerNormLinear: in_features must be at least 0, got -4",
    ),
    "experts of text": (
        lambda: quire.GroupedLinear(2, "4", 4),
        TypeError,
        "quire.GroupedLinear: in_features must be an int, got '4'",
    ),
    "a network of a flag": (
        lambda: quire.LayerNormMLP(4, True),
        TypeError,
        "quire.LayerNormMLP: ffn_hidden_size must be an int, got True",
    ),
    "a mixture whose shared expert is smaller than none": (
        lambda: quire.MoE(4, 4, 4, shared_ffn_hidden_size=-1),
        ValueError,
        "quire.MoE: shared_ffn_hidden_size must be at least 0, got -1",
    ),
    "a norm with text for eps": (
        lambda: quire.RMSNorm(4, "x"),
        TypeError,
        "quire.RMSNorm: eps must be a number, got 'x'",
    ),
    "a norm with an eps below 0": (
        lambda: quire.LayerNorm(4, -1e-5),
        ValueError,
        "quire.LayerNorm: eps must be finite and at least 0, got -1e-05",
    ),
    "a network whose activation has no limit": (
        lambda: quire.LayerNormMLP(4, 4, activation="clamped_swiglu", activation_params={"limit": math.nan}),
        ValueError,
        "quire.LayerNormMLP: limit of activation_params must be finite and at least 0, got nan",
    ),
    "a mixture whose activation has text": (
        lambda: quire.MoE(4, 4, 4, activation="clamped_swiglu", activation_params={"alpha": "a"}),
        TypeError,
        "quire.MoE: alpha must be a number, got 'a'",
    ),
    "a network whose parameters are a number": (
        lambda: quire.LayerNormMLP(4, 4, activation="clamped_swiglu", activation_params=1),
        TypeError,
        "quire.LayerNormMLP: activation_params must be a dict, got 1",
    ),
    "a norm of a flag": (lambda: quire.LayerNorm(True), ValueError, "must be one or more sizes, got True"),
    "a norm of fewer than none": (
        lambda: quire.LayerNorm([4, -4]),
        ValueError,
        "quire.LayerNorm: normalized_shape[1] must be at least 0, got -4",
    ),
    "a norm with text for a flag": (
        lambda: quire.RMSNorm(4, zero_centered_gamma="yes"),
        TypeError,
        "quire.RMSNorm: zero_centered_gamma must be a bool, got 'yes'",
    ),
    "a layer of ints": (
        lambda: quire.Linear(4, 4, params_dtype=torch.int8),
        ValueError,
        "quire.Linear: params_dtype must be a dtype of floating-point numbers of 16 bits or more, got torch.int8",
    ),
    "a layer of bytes": (
        lambda: quire.LayerNormMLP(4, 4, params_dtype=torch.float8_e4m3fn),
        ValueError,
        "got torch.float8_e4m3fn; to store weights in fewer bits, make the layer within quire.quantized_model_init",
    ),
    "a layer nowhere": (
        lambda: quire.Linear(4, 4, device="abacus"),
        RuntimeError,
        "quire.Linear: device 'abacus' is none that PyTorch can take here: ",
    ),
    "a flag for a number of groups": (
        lambda: quire.GroupedLinear(True, 4, 4),
        TypeError,
        "quire.GroupedLinear: num_gemms must be an int, got True",
    ),
    "sizes of groups as text": (
        lambda: quire.GroupedLinear(2, 4, 4)(X, "44"),
        TypeError,
        "quire.GroupedLinear: m_splits must be one int for each group, as a list or an int32 or int64 vector; got '44'",
    ),
    "memory of another shape": (
        lambda: quire.GroupedLinear(2, 32, 4)(X, [1, 1], out=torch.zeros(3)),
        ValueError,
        "quire.GroupedLinear: out must be [4, 4], got [3]",
    ),
    "a norm's layer with an eps that is none": (
        lambda: quire.LayerNormLinear(4, 4, math.nan),
        ValueError,
        "quire.LayerNormLinear: eps must be finite and at least 0, got nan",
    ),
    "a norm's network with a flag for eps": (
        lambda: quire.LayerNormMLP(4, 4, False),
        TypeError,
        "quire.LayerNormMLP: eps must be a number, got False",
    ),
    "a layer of a list": (lambda: tokens(lambda: layer()([1.0])), TypeError, "input of a layer must be a tensor"),
    "a layer of None": (
        lambda: tokens(lambda: layer()(None)),
        TypeError,
        "input of a layer must be a tensor, got None",
    ),
    "LayerNormMLP of a list": (
        lambda: tokens(lambda: quire.LayerNormMLP(4, 4)([1.0])),
        TypeError,
        "input of a layer must be a tensor, got [1.0]",
    ),
    "a microbatch that is text": (
        lambda: tokens(lambda: layer()(X, is_first_microbatch="yes")),
        TypeError,
        "quire.Linear.forward: is_first_microbatch must be a bool, got 'yes'",
    ),
    "a microbatch that is a number": (
        lambda: tokens(lambda: layer()(X, is_first_microbatch=1)),
        TypeError,
        "is_first_microbatch must be a bool, got 1",
    ),
    "an output that is text": (
        lambda: tokens(lambda: layer()(X, fp8_output="no")),
        TypeError,
        "fp8_output must be a bool, got 'no'",
    ),
    "a result rounded stochastically": (
        lambda: tokens(lambda: layer()(X, output_spec="nvfp4:sr")),
        ValueError,
        "output_spec='nvfp4:sr' rounds stochastically, and results are rounded to nearest; remove 'sr' from it",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_argument_of_a_wrong_kind_is_refused_in_words(name):
    act, error, words = CASES[name]
    with pytest.raises(error, match=re.escape(words)):
        act()
    assert quire.active_recipe() is None


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4:16x16", "fp8_tensor"])
def test_codes_may_be_shared_between_processes(spec):
    x = q(spec, columnwise=True)
    before = x.dequantize()
    assert not x.is_shared() and x.share_memory_() is x and x.is_shared()
    assert torch.equal(x.dequantize(), before) and all(tensor.is_shared() for tensor in x.buffers().values())


@pytest.mark.parametrize("name", recipes.names())
def test_layers_without_values_tell_shapes(name):
    meta = quire.Linear(32, 16, device="meta")
    with quire.autocast(recipe=recipes.from_name(name)):
        y = meta(META)
    y.sum().backward()
    assert y.is_meta and y.shape == (4, 16) and meta.weight.grad.is_meta and meta.weight.grad.shape == (16, 32)
