"""quire.te.TransformerLayer, MultiheadAttention and InferenceParams against computations in float64."""

import copy

import pytest
import torch

import quire
from python.te.transformer_ranks import layer_equals_one_process
from python.te.transformer_reference import Reference, close, tokens
from quire import te
from quire.te.common import recipe as recipes

B, S, S2, HIDDEN, FFN, HEADS = 2, 5, 6, 16, 24, 4
DIM = HIDDEN // HEADS


def names(prefix, *rest):
    return {f"{prefix}{name}" for each in rest for name in each.split()}


def both(prefix):
    return names(prefix, "weight bias")


LAYER_NORM = "layer_norm_weight layer_norm_bias"
SPLIT = "query_weight query_bias key_weight key_bias value_weight value_bias"
MLP = names("layernorm_mlp.", LAYER_NORM, "fc1_weight fc1_bias fc2_weight fc2_bias")
MLP_RMS = MLP - {"layernorm_mlp.layer_norm_bias"}
OF_SELF = names("self_attention.layernorm_qkv.", LAYER_NORM)
PROJ = both("self_attention.proj.")
#: Options -> the keys that TransformerEngine writes, without those of its extra states.
ATTENTION_KEYS = {
    "split": ({}, names("qkv.", SPLIT) | both("proj.")),
    "fused": ({"fuse_qkv_params": True}, both("qkv.") | both("proj.")),
    "norm": ({"input_layernorm": True}, names("layernorm_qkv.", LAYER_NORM, SPLIT) | both("proj.")),
    "RMSNorm": (
        {"input_layernorm": True, "normalization": "RMSNorm", "fuse_qkv_params": True, "bias": False},
        {"layernorm_qkv.layer_norm_weight", "layernorm_qkv.weight", "proj.weight"},
    ),
    "cross": (
        {"attention_type": "cross"},
        both("query_layer.") | names("key_value.", "key_weight key_bias value_weight value_bias") | both("proj."),
    ),
    "fused cross with norm": (
        {"attention_type": "cross", "input_layernorm": True, "fuse_qkv_params": True},
        names("layernorm_query.", LAYER_NORM, "weight bias") | both("key_value.") | both("proj."),
    ),
    "split cross with norm": (
        {"attention_type": "cross", "input_layernorm": True},
        names("layernorm_query.", LAYER_NORM, "query_weight query_bias")
        | names("key_value.", "key_weight key_bias value_weight value_bias")
        | both("proj."),
    ),
    "RMSNorm of heads": (
        {"qk_norm_type": "RMSNorm", "fuse_qkv_params": True},
        {"q_norm.weight", "k_norm.weight"} | both("qkv.") | both("proj."),
    ),
    "LayerNorm of heads": (
        {"qk_norm_type": "LayerNorm", "fuse_qkv_params": True},
        both("q_norm.") | both("k_norm.") | both("qkv.") | both("proj."),
    ),
    "L2Normalization of heads": (
        {"qk_norm_type": "L2Normalization", "fuse_qkv_params": True},
        both("qkv.") | both("proj."),
    ),
    "sink": (
        {"softmax_type": "learnable", "fuse_qkv_params": True},
        {"core_attention.softmax_offset"} | both("qkv.") | both("proj."),
    ),
}
LAYER_KEYS = {
    "split": ({}, OF_SELF | names("self_attention.layernorm_qkv.", SPLIT) | PROJ | MLP),
    "fused": ({"fuse_qkv_params": True}, OF_SELF | both("self_attention.layernorm_qkv.") | PROJ | MLP),
    "RMSNorm and swiglu without biases": (
        {"fuse_qkv_params": True, "normalization": "RMSNorm", "activation": "swiglu", "bias": False},
        names("self_attention.", "layernorm_qkv.layer_norm_weight layernorm_qkv.weight proj.weight")
        | names("layernorm_mlp.", "layer_norm_weight fc1_weight fc2_weight"),
    ),
    "decoder": (
        {"fuse_qkv_params": True, "layer_type": "decoder"},
        OF_SELF
        | both("self_attention.layernorm_qkv.")
        | names("inter_attention.layernorm_query.", LAYER_NORM, "weight bias")
        | names("inter_attention.", "key_value.weight key_value.bias proj.weight proj.bias")
        | PROJ
        | MLP,
    ),
    "output_layernorm": (
        {"output_layernorm": True, "normalization": "RMSNorm"},
        names("self_attention.qkv.", SPLIT) | PROJ | MLP_RMS | {"layernorm.weight"},
    ),
}


def layer_of(**options):
    return te.TransformerLayer(HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, **options)


def filled(layer, seed=0):
    """The layer with values for which every parameter matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 if parameter.dim() == 1 else 0.3))
            if "norm" in name and name.endswith(("layer_norm_weight", "norm.weight")):
                parameter.add_(1)
    return layer


def reference_of(layer, options, rotary=False):
    parameters = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    return Reference(parameters, HIDDEN, HEADS, options, rotary)


@pytest.mark.parametrize("name", ATTENTION_KEYS)
def test_attention_has_the_keys_of_transformer_engine(name):
    options, wanted = ATTENTION_KEYS[name]
    check_keys(lambda: te.MultiheadAttention(HIDDEN, HEADS, **options), wanted)


@pytest.mark.parametrize("name", LAYER_KEYS)
def test_a_layer_has_the_keys_of_transformer_engine(name):
    options, wanted = LAYER_KEYS[name]
    check_keys(lambda: layer_of(**options), wanted)


def check_keys(make, wanted):
    """State under the wanted names loads strictly, and another layer's state is the same."""
    first, second = filled(make()), make()
    state = first.state_dict()
    assert set(state) == wanted
    attentions = [name for name in ("self_attention.", "inter_attention.") if hasattr(first, name[:-1])] or [""]
    holders = {name.rpartition(".")[0] for name in wanted} | {f"{name}core_attention" for name in attentions}
    holders |= {"q_norm", "k_norm"} if getattr(first, "q_norm", None) is not None else set()
    # TransformerEngine 1.6 and 1.7 wrote the last one.
    holders |= {f"{name}core_attention.fused_attention" for name in attentions}
    extra = {f"{holder}._extra_state": torch.empty(0, dtype=torch.uint8) for holder in holders}
    second.load_state_dict(state | extra, strict=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in second.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        second.load_state_dict({name: tensor for name, tensor in state.items() if not name.endswith("proj.weight")})


RMS = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "zero_centered_gamma": True}
#: Options of the layer, whether queries and keys are turned.
LAYERS = {
    "pre-norm": ({}, False),
    "RMSNorm and swiglu": (RMS | {"fuse_qkv_params": True, "qkv_weight_interleaved": False}, False),
    "residual after the norm": ({"apply_residual_connection_post_layernorm": True}, False),
    "output_layernorm": ({"output_layernorm": True, "fuse_qkv_params": True}, False),
    "parallel_attention_mlp": ({"parallel_attention_mlp": True}, False),
    "decoder": ({"layer_type": "decoder"}, False),
    "fused decoder with residual after the norm": (
        {"layer_type": "decoder", "fuse_qkv_params": True, "apply_residual_connection_post_layernorm": True},
        False,
    ),
    "decoder, not interleaved": (
        {"layer_type": "decoder", "fuse_qkv_params": True, "qkv_weight_interleaved": False, "num_gqa_groups": 2},
        False,
    ),
    "groups and rotary": ({"num_gqa_groups": 2}, True),
    "fused groups and interleaved rotary": (
        {"num_gqa_groups": 2, "fuse_qkv_params": True, "rotary_pos_interleaved": True},
        True,
    ),
    "L2Normalization of heads": ({"qk_norm_type": "L2Normalization", "qk_norm_eps": 0.1}, True),
    "RMSNorm of heads": ({"qk_norm_type": "RMSNorm", "num_gqa_groups": 2}, True),
    "LayerNorm of heads before rotary": ({"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True}, True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_float64(name):
    options, rotary = LAYERS[name]
    layer = filled(layer_of(**options))
    reference = reference_of(layer, options, rotary)
    x, encoded = tokens(S, B, HIDDEN), tokens(S2, B, HIDDEN, seed=2)
    call, given, wanted_given = {}, [x], [x.detach().double().requires_grad_()]
    if options.get("layer_type") == "decoder":
        call, given = {"encoder_output": encoded}, [x, encoded]
        wanted_given.append(encoded.detach().double().requires_grad_())
    if rotary:
        interleaved = options.get("rotary_pos_interleaved", False)
        call["rotary_pos_emb"] = te.RotaryPositionEmbedding(DIM, interleaved=interleaved)(S)
    y = layer(x, **call)
    wanted = reference.layer(*[t.transpose(0, 1) for t in wanted_given]).transpose(0, 1)
    close(y, wanted)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad(y, [*given, *layer.parameters()], dy)
    all_wanted = torch.autograd.grad(wanted, [*wanted_given, *reference.parameters.values()], dy.double())
    for grad, of_reference in zip(grads, all_wanted, strict=True):
        close(grad, of_reference)


def test_the_layouts_of_a_layer_agree():
    x = tokens(S, B, HIDDEN)
    y = filled(layer_of())(x)
    rows = x.transpose(0, 1)
    close(filled(layer_of(attn_input_format="bshd"))(rows).transpose(0, 1), y.double(), 1e-6)
    packed = filled(layer_of(attn_input_format="thd", self_attn_mask_type="padding_causal"))
    ends = torch.arange(0, B * S + 1, S, dtype=torch.int32)
    z = packed(rows.reshape(-1, HIDDEN), cu_seqlens_q=ends, max_seqlen_q=S)
    close(z.unflatten(0, (B, S)).transpose(0, 1), y.double(), 1e-6)


RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_is_one_graph_in_every_recipe(name, compiler, equal_bits):
    recipe = RECIPES[name]

    def train(compiled):
        """Outputs and gradients of two steps."""
        torch.manual_seed(0)
        options = {"num_gqa_groups": 2, "params_dtype": torch.bfloat16, "attn_input_format": "bshd"}
        layer = te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, **options)
        function, rotary = compiler(layer) if compiled else layer, te.RotaryPositionEmbedding(16)(16)
        results = []
        for seed in range(2):
            x = tokens(2, 16, 64, seed=seed).detach().bfloat16().requires_grad_()
            with quire.autocast(recipe=recipe):
                y = function(x, rotary_pos_emb=rotary)
            y.backward(torch.ones_like(y))
            results += [y, x.grad, *[p.grad.clone() for p in layer.parameters()]]
        with quire.autocast(enabled=False):
            assert not torch.equal(layer(x, rotary_pos_emb=rotary), y)
        return results

    eager, compiled = train(False), train(True)
    assert compiler.graphs == 1
    assert all(equal_bits(a, b) for a, b in zip(eager, compiled, strict=True))


#: Numbers of new tokens, call after call. The order of sequences changes, and in the third call the padding of sequence
#: "a" reaches beyond the cache.
CALLS = ({"a": 4, "b": 2}, {"a": 1, "b": 1}, {"b": 3, "a": 1}, {"b": 1, "a": 1})
LONGEST, TOTAL = 4, 7


def arranged(parts, layout):
    """Tokens [count, hidden] of each sequence as one batch in a layout, with large values where none is."""
    if layout == "thd":
        return torch.cat(parts)
    rows = torch.full((len(parts), 1 if max(map(len, parts)) == 1 else LONGEST, HIDDEN), 7.0)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows.transpose(0, 1) if layout == "sbhd" else rows


def separated(y, counts, layout):
    if layout == "thd":
        return y.split(counts)
    return [row[:count] for row, count in zip(y.transpose(0, 1) if layout == "sbhd" else y, counts, strict=True)]


#: Layout, whether the largest number of new tokens is given, whether it is compiled.
GENERATING = [
    ("sbhd", False, False),
    ("bshd", False, False),
    ("bshd", False, True),
    ("thd", True, False),
    ("thd", False, False),
    ("thd", False, True),
]


@pytest.mark.parametrize(("layout", "longest", "compiled"), GENERATING)
def test_generation_is_the_forward_of_the_whole_sequences(layout, longest, compiled, compiler):
    options = {"num_gqa_groups": 2, "rotary_pos_interleaved": layout == "bshd"}
    layers = [filled(layer_of(**options, layer_number=n, attn_input_format=layout), n).eval() for n in (1, 2)]
    turned = te.RotaryPositionEmbedding(DIM, interleaved=options["rotary_pos_interleaved"])(TOTAL)
    sizes = {"num_heads_kv": 2, "head_dim_k": DIM, "dtype": torch.float32}
    sizes |= {"max_ctx_len": LONGEST} if longest else {}
    cache = te.InferenceParams(B, TOTAL, **sizes, qkv_format=layout)
    call = {"inference_params": cache, "rotary_pos_emb": turned, "self_attn_mask_type": "padding_causal"}

    def run(x):
        for layer in layers:
            x = layer(x, **call)
        return x

    with pytest.raises(ValueError, match=r"call pre_step\(\{sequence: number of its new tokens\}\) before the model"):
        run(arranged([torch.zeros(1, HIDDEN)] * B, layout))
    assert not cache.cache
    for layer in layers if compiled else ():
        cache.allocate_memory(layer.layer_number)
    function = compiler(run, dynamic=False) if compiled else run
    texts = {name: tokens(TOTAL, HIDDEN, seed=seed).detach() for seed, name in enumerate("ab")}
    found = {name: torch.empty(0, HIDDEN) for name in texts}
    with torch.no_grad():
        for new in CALLS:
            cache.pre_step(new)
            parts = [texts[name][len(found[name]) :][:count] for name, count in new.items()]
            y = separated(function(arranged(parts, layout)), list(new.values()), layout)
            found |= {name: torch.cat([found[name], part]) for name, part in zip(new, y, strict=True)}
    for name, text in texts.items():
        wanted = text.double()[None]
        for layer in layers:
            wanted = reference_of(layer, options, rotary=True).layer(wanted)
        close(found[name], wanted[0].detach())
    # Of several tokens and of one, or of six tokens, of four and of two.
    assert compiler.graphs == ((3 if layout == "thd" else 2) if compiled else 0)


def test_a_layer_made_on_meta_computes_after_its_state_is_loaded():
    options = {"num_gqa_groups": 2, "fuse_qkv_params": True, "softmax_type": "learnable", "qk_norm_type": "RMSNorm"}
    options |= {"layer_type": "decoder"}
    layer, x = filled(layer_of(**options)), tokens(S, B, HIDDEN)
    y = layer(x, encoder_output=x)
    later = layer_of(**options, device="meta")
    assert {p.device.type for p in later.parameters()} == {"meta"}
    assert later(x.to("meta"), encoder_output=x.to("meta")).shape == y.shape
    later.to_empty(device="cpu").load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(later(x, encoder_output=x), y)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x, encoder_output=x), y)
    filled(twin, seed=5)
    assert torch.equal(layer(x, encoder_output=x), y) and not torch.equal(twin(x, encoder_output=x), y)


@pytest.mark.parametrize("name", ["pre-norm", "RMSNorm of heads", "output_layernorm"])
def test_autocast_computes_in_bfloat16(name):
    options, rotary = LAYERS[name]
    layer, x = filled(layer_of(**options)), tokens(S, B, HIDDEN)
    call = {"rotary_pos_emb": te.RotaryPositionEmbedding(DIM)(S)} if rotary else {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x, **call)
    y.sum().backward()
    wanted = reference_of(layer, options, rotary).layer(x.detach().double().transpose(0, 1)).transpose(0, 1)
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    close(y, wanted, 3e-2)
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


def test_dropout_follows_the_seed_and_stops_in_eval():
    x = tokens(S, B, HIDDEN)
    plain = filled(layer_of())(x)
    for options in ({"hidden_dropout": 0.5}, {"attention_dropout": 0.5}, {"drop_path_rate": 0.5}):
        layer = te.TransformerLayer(HIDDEN, FFN, HEADS, **{"hidden_dropout": 0.0, "attention_dropout": 0.0} | options)
        filled(layer)
        results = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            results.append(layer(x))
        assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
        assert torch.equal(layer.eval()(x), plain)


def test_what_does_not_fit_is_refused_in_words():
    with pytest.raises(ValueError, match="drop_path_rate must be 0 to 1, got 1.5"):
        layer_of(drop_path_rate=1.5)
    with pytest.raises(ValueError, match="num_attention_heads must be a positive number, got 0"):
        te.MultiheadAttention(HIDDEN, 0)
    with pytest.raises(TypeError, match="hidden_size must be an int"):
        te.MultiheadAttention("16", HEADS)
    with pytest.raises(TypeError, match="quire.te.TransformerLayer: hidden_states must be a .*ensor"):
        layer_of()([1.0])


def test_a_layer_sharded_over_processes_computes_what_one_process_does(two):
    for recipe, sequence, bound in ((None, True, 1e-5), ("mxfp8", False, 1e-5)):
        two.run(layer_equals_one_process, recipe, sequence, bound)
