"""quire.te.DotProductAttention: masks, biases and layouts against a computation in float64."""

import copy

import pytest
import torch

from python.te.attention_reference import DV, SKV, SQ, B, D, G, H, attention, inputs
from quire import te

LENGTHS_Q, LENGTHS_KV = (3, 5), (6, 2)
CU_Q, CU_KV = (torch.tensor([0, a, a + b], dtype=torch.int32) for a, b in (LENGTHS_Q, LENGTHS_KV))
ARBITRARY = torch.rand(B, 1, SQ, SKV, generator=torch.Generator().manual_seed(9)) > 0.6


def inside(b, i, j):
    return i < LENGTHS_Q[b] and j < LENGTHS_KV[b]


def lead(b):
    return LENGTHS_KV[b] - LENGTHS_Q[b]


#: Options of a call -> which keys a query has, with the lengths of inputs().
MASKS = {
    "no_mask": ({"attn_mask_type": "no_mask"}, lambda b, i, j: True),
    "causal": ({"attn_mask_type": "causal"}, lambda b, i, j: j <= i),
    "causal_bottom_right": ({"attn_mask_type": "causal_bottom_right"}, lambda b, i, j: j <= i + SKV - SQ),
    "padding": ({"attn_mask_type": "padding"}, inside),
    "padding_causal": ({"attn_mask_type": "causal,padding"}, lambda b, i, j: inside(b, i, j) and j <= i),
    "padding_causal_bottom_right": (
        {"attn_mask_type": "padding_causal_bottom_right"},
        lambda b, i, j: inside(b, i, j) and j <= i + lead(b),
    ),
    "arbitrary": (
        {"attn_mask_type": "arbitrary", "attention_mask": ARBITRARY},
        lambda b, i, j: not ARBITRARY[b, 0, i, j],
    ),
    "window": (
        {"attn_mask_type": "no_mask", "window_size": (2, 1)},
        lambda b, i, j: -2 <= j - (i + SKV - SQ) <= 1,
    ),
    "window from the top left": (
        {"attn_mask_type": "no_mask", "window_size": (2, 1), "bottom_right_diagonal": False},
        lambda b, i, j: -2 <= j - i <= 1,
    ),
    "causal window": ({"attn_mask_type": "causal", "window_size": (1, 0)}, lambda b, i, j: i - 1 <= j <= i),
    "padding window": (
        {"attn_mask_type": "padding", "window_size": (1, 1)},
        lambda b, i, j: inside(b, i, j) and -1 <= j - (i + lead(b)) <= 1,
    ),
}


def module(**options):
    return te.DotProductAttention(
        H, (D, DV), **{"num_gqa_groups": G, "qkv_format": "bshd", "attention_type": "cross"} | options
    )


def lengths(options):
    return {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV} if "padding" in options["attn_mask_type"] else {}


#: Of y in float64: scores below 8 have D + 4 roundings, which softmax doubles, and a sum has SKV + 8 more. That is less
#: than 256, of values below 4. Of a gradient: H / G * SQ = 10 terms with another factor below 4 have 32 times that.
BOUND, OF_GRADIENT = 256 * 4 * 2.0**-53, 32


def check(y, expected, given):
    """y [b, s, h * dv] and the gradients of what it came from are those of another computation, both in float64."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    expected = expected.flatten(2)
    assert y.shape == expected.shape and torch.allclose(y, expected, atol=BOUND, rtol=0)
    grads = torch.autograd.grad(y, given, dy.double())
    all_wanted = torch.autograd.grad(expected, given, dy.double(), retain_graph=True)
    for grad, wanted in zip(grads, all_wanted, strict=True):
        assert grad.dtype == torch.float64 and wanted.abs().max() > 0
        assert torch.allclose(grad, wanted, atol=OF_GRADIENT * BOUND, rtol=0)


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_gradients_are_those_of_float64(name, compiler):
    options, allowed = MASKS[name]
    given = inputs()
    layer = module()
    compiled = [compiler(layer)] if name in ("causal", "arbitrary", "padding window") else []
    expected = attention(*given, allowed)
    for function in (layer, *compiled):
        check(function(*given, **options, **lengths(options)), expected, given)
    # The same by the constructor's options.
    names = ("attn_mask_type", "window_size", "bottom_right_diagonal")
    of_call = {name: value for name, value in options.items() if name not in names}
    other = module(**{name: value for name, value in options.items() if name in names})
    assert torch.equal(other(*given, **of_call, **lengths(options)), layer(*given, **options, **lengths(options)))


@pytest.mark.parametrize("name", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding_by_masks_is_padding_by_lengths(name):
    options, given = MASKS[name][0], inputs()
    places = torch.arange(SQ), torch.arange(SKV)
    masks = tuple(
        (place >= torch.tensor(each)[:, None])[:, None, None]
        for place, each in zip(places, (LENGTHS_Q, LENGTHS_KV), strict=True)
    )
    by_mask = module()(*given, attention_mask=masks, **options)
    assert torch.equal(by_mask, module()(*given, **options, **lengths(options)))
    with pytest.raises(ValueError, match="attention_mask must be a pair of masks"):
        module()(*given, attention_mask=masks[0], **options)
    own = [t[:, :SQ] for t in given]
    alone = module(attention_type="self")(*own, attention_mask=masks[0], **options)
    assert torch.equal(alone, module(attention_type="self")(*own, cu_seqlens_q=CU_Q, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", MASKS)
def test_other_dtypes_give_the_bits_of_pytorch_s_function(name, dtype):
    given, (options, allowed) = inputs(dtype), MASKS[name]
    y = module()(*given, **options, **lengths(options))
    keep = torch.tensor([[[allowed(b, i, j) for j in range(SKV)] for i in range(SQ)] for b in range(B)])[:, None]
    q, k, v = (t.transpose(1, 2) for t in given)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)
    expected = expected.transpose(1, 2).flatten(2)
    assert y.dtype == dtype and torch.equal(y, expected)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    for grad, wanted in zip(*(torch.autograd.grad(each, given, dy) for each in (y, expected)), strict=True):
        assert torch.equal(grad, wanted)


def test_autocast_computes_in_its_dtype_and_keeps_the_bias_exact():
    given = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(attn_mask_type="no_mask")(*given, core_attention_bias_type="alibi")
    low = [t.bfloat16() for t in given]
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, module(attn_mask_type="no_mask")(*low, core_attention_bias_type="alibi"))


SLOPES = [0.25, 0.0625, 0.015625, 0.00390625]  # of 4 heads, from the paper


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias", "alibi", "alibi of the batch"])
def test_biases_and_their_gradients(kind, compiler):
    scale, given, extra = 0.3, inputs(), {"core_attention_bias_type": kind.partition(" ")[0]}
    if kind.startswith("alibi"):
        slopes = torch.randint(1, 64, (B, H)) / 64 if kind != "alibi" else torch.tensor([SLOPES] * B)
        extra |= {"alibi_slopes": slopes} if kind != "alibi" else {}

        def biased(b, h, i, j, dot):
            return dot * scale - slopes[b, h].double() * abs(i + SKV - SQ - j)
    else:
        bias = torch.randn(1, H, SQ, SKV, dtype=torch.float64, requires_grad=True)
        extra["core_attention_bias"] = bias

        def biased(b, h, i, j, dot):
            value = bias[0, h, i, j].double()
            return (dot + value) * scale if kind == "pre_scale_bias" else dot * scale + value

    layer = module(softmax_scale=scale)
    needed = given + ([bias] if not kind.startswith("alibi") else [])
    expected = attention(*given, lambda b, i, j: j <= i + SKV - SQ, scale=scale, bias=biased)
    for function in (layer, compiler(layer)):
        check(function(*given, attn_mask_type="causal_bottom_right", **extra), expected, needed)


def test_alibi_of_padded_sequences_counts_from_their_ends():
    given = inputs()
    y = module(attn_mask_type="padding")(*given, core_attention_bias_type="alibi", **lengths(MASKS["padding"][0]))
    expected = attention(*given, inside, bias=lambda b, h, i, j, dot: dot / D**0.5 - SLOPES[h] * abs(i + lead(b) - j))
    check(y, expected, given)


def test_slopes_of_a_number_of_heads_that_is_no_power_of_2():
    from quire.te.attention.masks import alibi_slopes

    assert alibi_slopes(6, torch.device("cpu")).tolist() == [*SLOPES, 0.5, 0.125]


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding"])
def test_sinks(softmax_type, mask):
    given, layer = inputs(), module(softmax_type=softmax_type).double()
    needed, sink = list(given), lambda h: torch.zeros((), dtype=torch.float64)
    if softmax_type == "learnable":
        with torch.no_grad():
            layer.softmax_offset.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
        assert [*layer.state_dict()] == ["softmax_offset"]
        needed.append(layer.softmax_offset)
        sink = lambda h: layer.softmax_offset[h].double()  # noqa: E731
    options, allowed = MASKS[mask]
    check(layer(*given, **options, **lengths(options)), attention(*given, allowed, sink=sink), needed)


LAYOUTS = {"bshd": lambda t: t, "sbhd": lambda t: t.transpose(0, 1)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_packed_tensors(layout):
    given = inputs(lengths=(SQ, SQ), v_features=D)
    order = LAYOUTS[layout]
    layer = te.DotProductAttention(H, D, G, qkv_format=layout)
    y = layer(*[order(t) for t in given])
    check(order(y), attention(*given, lambda b, i, j: j <= i), given)
    q, k, v = (order(t.detach()) for t in given)
    for dim in (-3, -2):
        assert torch.equal(layer(q, kv_layer=torch.stack([k, v], dim), qkv_interleave_dim=dim), y)
        same = te.DotProductAttention(G, D, qkv_format=layout)
        assert torch.equal(same(qkv_layer=torch.stack([k, k, v], dim), qkv_interleave_dim=dim), same(k, k, v))
    with pytest.raises(ValueError, match="pass query_layer, key_layer and value_layer, or"):
        layer(q, k, v, kv_layer=torch.stack([k, v], -3))
    with pytest.raises(ValueError, match="kv_layer must have size 2 at qkv_interleave_dim"):
        layer(q, kv_layer=torch.stack([k, k, v], -3))


def packed(rows, sizes, space=0):
    """[b, s, *] -> [t, *], with tokens of no sequence after each of them."""
    return torch.cat(
        [torch.cat([row[:n], row[:1].expand(space, *row.shape[1:]) * 50]) for row, n in zip(rows, sizes, strict=True)]
    )


@pytest.mark.parametrize("space", [0, 2])
@pytest.mark.parametrize("name", ["padding", "padding_causal", "padding_causal_bottom_right", "padding window"])
def test_thd_is_each_sequence_alone(name, space, compiler):
    options, allowed = MASKS[name]
    given = inputs()
    call = options | lengths(options) | {"qkv_format": "thd"}
    if space:
        padded = (cu + torch.tensor([0, space, 2 * space], dtype=torch.int32) for cu in (CU_Q, CU_KV))
        call |= dict(zip(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded, strict=True))
    layer, expected = module(), attention(*given, allowed)
    sizes = {"max_seqlen_q": SQ, "max_seqlen_kv": SKV}
    compiled = [(compiler(layer), sizes), (compiler(layer), {})] if name == "padding_causal" else []
    for function, known in ((layer, {}), (layer, sizes), *compiled):
        tokens = [packed(t, n, space) for t, n in zip(given, (LENGTHS_Q, LENGTHS_KV, LENGTHS_KV), strict=True)]
        y = function(*tokens, **call, **known)
        assert y.shape == (sum(LENGTHS_Q) + 2 * space, H * DV)
        begin = [0, LENGTHS_Q[0] + space]
        rows = [torch.nn.functional.pad(y[o : o + n], (0, 0, 0, SQ - n)) for o, n in zip(begin, LENGTHS_Q, strict=True)]
        check(torch.stack(rows), expected, given)
        between = torch.ones(len(y), dtype=torch.bool)
        between[[o + i for o, n in zip(begin, LENGTHS_Q, strict=True) for i in range(n)]] = False
        assert between.sum() == 2 * space and not y[between].any()


def test_thd_graphs_do_not_depend_on_lengths(compiler):
    layer = compiler(module(attn_mask_type="padding_causal", qkv_format="thd"))
    q, k, v = (t.detach().flatten(0, 1) for t in inputs(lengths=(SQ, SQ)))
    sizes = {"max_seqlen_q": 9, "max_seqlen_kv": 9}
    for split in (1, 4, 9):
        cu = torch.tensor([0, split, 10], dtype=torch.int32)
        y = layer(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, **sizes)
        alone = module()
        parts = [alone(*(t[None, rows] for t in (q, k, v)))[0] for rows in (slice(0, split), slice(split, 10))]
        assert torch.allclose(y, torch.cat(parts), atol=2 * BOUND, rtol=0)
    assert compiler.graphs == 1


def test_no_tokens_and_sequences_without_any():
    layer = module(attn_mask_type="padding", qkv_format="thd")
    q, k, v = (t[0][:0] for t in inputs())
    cu = torch.zeros(3, dtype=torch.int32)
    assert layer(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu).shape == (0, H * DV)
    q, k, v = (t[0][:2] for t in inputs())
    cu = torch.tensor([0, 0, 2, 2], dtype=torch.int32)
    y = layer(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    assert torch.allclose(y, module(attn_mask_type="no_mask")(q[None], k[None], v[None])[0], atol=2 * BOUND, rtol=0)
    assert not layer(q, k, v, cu_seqlens_q=cu[:2], cu_seqlens_kv=cu[:2]).any()
    assert module(attn_mask_type="no_mask")(*(t[:0] for t in inputs())).shape == (0, SQ, H * DV)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_recomputing_attention_gives_the_same_bits_with_dropout(compiled, compiler):
    layer = module(attention_dropout=0.5)
    function = compiler(layer) if compiled else layer
    results = []
    for recomputed in (False, True):
        torch.manual_seed(5)
        given = inputs()
        y = function(*given, checkpoint_core_attention=recomputed)
        y.square().sum().backward()
        results.append([y, *(t.grad for t in given)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    plain = module()(*inputs())
    assert not torch.equal(results[0][0], plain)
    layer.eval()
    assert torch.equal(layer(*inputs()), plain)


def test_dropout_draws_within_the_tracker():
    class Tracker:
        forks = 0

        def fork(self):
            Tracker.forks += 1
            return torch.random.fork_rng()

    given = inputs()
    layer = module(attention_dropout=0.5, get_rng_state_tracker=Tracker)
    torch.manual_seed(1)
    first, second = layer(*given), layer(*given)
    assert torch.equal(first, second) and Tracker.forks == 2
    with pytest.raises(NotImplementedError, match="checkpoint_core_attention with dropout and get_rng_state_tracker"):
        layer(*given, checkpoint_core_attention=True)


@pytest.mark.parametrize("name", ["no_mask", "causal", "padding", "window"])
def test_the_largest_scores(name):
    options, allowed = MASKS[name]
    q, k, v = inputs()
    y, logits = module(return_max_logit=True)(q, k, v, **options, **lengths(options))
    assert torch.equal(y, module()(q, k, v, **options, **lengths(options)))
    for h in range(H):
        dots = [
            float(q[b, i, h].detach().double() @ k[b, j, h // 2].detach().double()) / D**0.5
            for b in range(B)
            for i in range(SQ)
            for j in range(SKV)
            if allowed(b, i, j)
        ]
        assert abs(float(logits[h]) - max(dots)) <= 2.0**-24 * 8  # rounded to float32, and below 8


def test_other_ways_to_run():
    given = inputs()
    layer = module()
    y = layer(*given)
    assert torch.equal(copy.deepcopy(layer)(*given), y)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(layer(*given), y)
    strided = [torch.stack([t, t], -1)[..., 0] for t in given]
    assert not strided[0].is_contiguous() and torch.allclose(layer(*strided), y, atol=2 * BOUND, rtol=0)
    exported = torch.export.export(layer, tuple(t.detach() for t in given))
    assert torch.allclose(exported.module()(*given), y, atol=2 * BOUND, rtol=0)
    assert module()(*[t.to("meta") for t in given]).shape == y.shape


class OtherSize:
    def size(self):
        return 2


def call(**options):
    return lambda: module()(*inputs(), **options)


WRONG = {
    "type of mask": (call(attn_mask_type="causl"), ValueError, "type of mask must be one of no_mask, .*got 'causl'"),
    "window": (call(window_size=(-2, 0)), ValueError, r"window_size must be \(left, right\)"),
    "layout": (call(qkv_format="bhsd"), ValueError, "qkv_format must be one of 'sbhd'"),
    "no lengths": (call(attn_mask_type="padding"), ValueError, "needs attention_mask, or cu_seqlens_q"),
    "too few lengths": (
        call(attn_mask_type="padding", cu_seqlens_q=CU_Q[:2], cu_seqlens_kv=CU_KV),
        ValueError,
        r"for b = 2 sequences; got \[2\] and \[3\]",
    ),
    "no arbitrary mask": (call(attn_mask_type="arbitrary"), ValueError, "'arbitrary' needs attention_mask, bool"),
    "bias without type": (call(core_attention_bias=torch.ones(1)), ValueError, "core_attention_bias belongs to"),
    "type of bias": (call(core_attention_bias_type="alib"), ValueError, "core_attention_bias_type must be one of"),
    "fp8_output": (call(fp8_output=True), NotImplementedError, "attention is in high precision; leave it False"),
    "score_mod": (call(score_mod=print), NotImplementedError, "use torch.nn.attention.flex_attention"),
    "unknown": (call(attention_masks=None), TypeError, "there is no option 'attention_masks'.*did you mean"),
    "dtypes": (lambda: module()(*inputs()[:2], inputs(torch.float16)[2]), TypeError, "q, k and v must have one dtype"),
    "shapes": (lambda: module()(*inputs()[:2], inputs()[0]), ValueError, "q, k and v must have the dimensions bshd"),
    "tokens": (
        lambda: module()(*inputs()[:2], inputs(lengths=(1, 3))[2]),
        ValueError,
        "k and v must have the same tokens",
    ),
    "groups": (lambda: te.DotProductAttention(4, 8, 3), ValueError, "num_gqa_groups must divide"),
    "attention_type": (lambda: module(attention_type="x"), ValueError, "attention_type must be one of"),
    "softmax_type": (lambda: module(softmax_type="x"), ValueError, "softmax_type must be one of"),
    "context parallel": (lambda: module(cp_group=OtherSize()), NotImplementedError, "a sequence is not sharded over"),
    "group": (lambda: module().set_tensor_parallel_group(OtherSize()), ValueError, "made for 1 ranks, got a group"),
    "thd without padding": (
        lambda: module(qkv_format="thd")(*[t[0] for t in inputs()]),
        ValueError,
        "qkv_format='thd' needs a padding type of mask",
    ),
    "longer than max_seqlen": (
        lambda: module(qkv_format="thd", attn_mask_type="padding")(
            *[t[0] for t in inputs()],
            max_seqlen_q=2,
            **{"cu_seqlens_q": CU_Q[:2], "cu_seqlens_kv": CU_KV[:2]},
        ),
        ValueError,
        r"max_seqlen must be at least the length of each sequence, got 2 for sequences of \[3\]",
    ),
    "too many": (lambda: te.DotProductAttention(*range(40)), TypeError, "there are 22 arguments, got"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_in_words(name):
    function, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        function()


def test_options_may_follow_by_position_in_the_order_of_transformer_engine():
    layer = te.DotProductAttention(H, D, G, 0.25, "bshd", "no_mask", (1, 1))
    found = (layer.num_gqa_groups, layer.attention_dropout, layer.qkv_format, layer.attn_mask_type, layer.window_size)
    assert found == (G, 0.25, "bshd", "no_mask", (1, 1))


def test_the_state_of_transformer_engine_loads():
    state = {"core._extra_state": torch.empty(0), "core.softmax_offset": torch.ones(H)}
    model = torch.nn.ModuleDict({"core": module(softmax_type="learnable")})
    model.load_state_dict(state, strict=True)
    assert torch.equal(model["core"].softmax_offset, torch.ones(H))
