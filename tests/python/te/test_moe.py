"""TransformerEngine's names for routing and permutation, against what its documentation says in plain PyTorch."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import quire
from python.moe import moe_reference as reference
from quire import te
from steps import assert_rounded

pytestmark = pytest.mark.any_device


def settled(test):
    return hypothesis.settings(max_examples=50, deadline=None, database=None, derandomize=True)(test)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape, seed=0):
    """Sums and products of these are exact in float32."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


@st.composite
def masks(draw):
    tokens, experts = draw(st.integers(0, 10)), draw(st.integers(1, 5))
    values = draw(st.lists(st.booleans(), min_size=tokens * experts, max_size=tokens * experts))
    return torch.tensor(values, dtype=torch.bool).reshape(tokens, experts)


def sorted_places(mask):
    """(token, expert) of each row: experts in order, tokens in order."""
    return [(t, e) for e in range(mask.shape[1]) for t in range(len(mask)) if mask[t, e]]


@settled
@hypothesis.given(masks(), st.sampled_from([torch.int32, torch.bool]), st.integers(0, 3))
def test_a_mask_permutes_rows_and_probs(mask, dtype, spare):
    places, x = sorted_places(mask), random(len(mask), 6)
    probs = (torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) + 0.1).requires_grad_()
    rows = len(places) + spare
    tokens = torch.tensor([t for t, _ in places], dtype=torch.long)
    experts = torch.tensor([e for _, e in places], dtype=torch.long)
    inp = x.clone().requires_grad_()
    out, row_id_map = te.moe_permute(inp, mask.to(dtype), rows)
    assert out.shape == (rows, 6) and torch.equal(out[: len(places)], x[tokens]) and not out[len(places) :].any()
    out, moved, again = te.moe_permute_with_probs(inp, probs, mask.to(dtype), rows)
    assert torch.equal(row_id_map, again) and torch.equal(out[: len(places)], x[tokens])
    assert torch.equal(moved[: len(places)], probs[tokens, experts]) and not moved[len(places) :].any()
    dout, dmoved = integers(rows, 6, seed=2), random(rows, seed=3)
    dx, dprobs = torch.autograd.grad((out, moved), (inp, probs), (dout, dmoved))
    assert torch.equal(dx, torch.zeros(len(mask), 6).index_add_(0, tokens, dout[: len(places)]))
    expected = torch.zeros(mask.shape)
    expected[tokens, experts] = dmoved[: len(places)]
    assert torch.equal(dprobs, expected)


@settled
@hypothesis.given(masks(), st.booleans(), st.integers(1, 8))
def test_unpermuting_sums_over_experts_with_and_without_padding(mask, merge, align):
    x, load = integers(len(mask), 6), mask.sum(0)
    probs = torch.randint(1, 8, mask.shape, generator=torch.Generator().manual_seed(1)) / 8
    out, moved, row_id_map, pad_offsets, padded = te.moe_permute_and_pad_with_probs(x, probs, mask, load, align)
    assert padded.tolist() == [-(-n // align) * align for n in load.tolist()] and len(out) == padded.sum()
    plain, first = te.moe_permute_with_probs(x, probs, mask, int(load.sum())), 0
    start = 0
    for expert, count in enumerate(load.tolist()):
        for got, expected in zip((out, moved), plain[:2], strict=True):
            assert torch.equal(got[start : start + count], expected[first : first + count])
            assert not got[start + count : start + padded[expert]].any()
        first, start = first + count, start + int(padded[expert])
    given = {"merging_probs": probs, "restore_shape": x.shape} if merge else {}
    combined = te.moe_unpermute(out, row_id_map, pad_offsets=pad_offsets, **given)
    assert torch.equal(combined, x * ((probs if merge else 1) * mask).sum(1, keepdim=True))
    assert torch.equal(combined, te.moe_unpermute(plain[0], row_id_map, **given))
    positional = te.moe_unpermute(out, row_id_map, given.get("merging_probs"), None, "mask", None, pad_offsets)
    assert torch.equal(combined, positional)


def test_rows_that_pad_a_routing_map_are_zero():
    mask, probs = torch.ones(3, 2, dtype=torch.int32), torch.tensor([[0.5, 0.0], [0.25, 0.75], [0.0, 1.0]])
    x = random(3, 4).requires_grad_()
    out, moved, row_id_map = te.moe_permute_with_probs(x, probs, mask, 6)
    wanted = moved != 0
    assert wanted.tolist() == [True, True, False, False, True, True] and not out[~wanted].any()
    assert torch.equal(out[wanted], x[[0, 1, 1, 2]])
    out.sum().backward()
    assert x.grad[:, 0].tolist() == [1.0, 2.0, 1.0]
    assert te.moe_unpermute(torch.ones(6, 4), row_id_map).eq(2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [0, 7, 30])
def test_indices_permute_rows_of_which_the_last_are_dropped(dtype, kept):
    ids = torch.randint(0, 5, (10, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x, probs = integers(10, 8).to(dtype).requires_grad_(), torch.rand(10, 3, requires_grad=True)
    order = ids.flatten().argsort(stable=True)[: kept or 30]
    out, row_id_map = te.moe_permute(x, ids, kept, -1, "index")
    assert torch.equal(out, x[order // 3]) and row_id_map.shape == (30,)
    row_map = torch.full((30,), -1, dtype=torch.int32)
    row_map[order] = torch.arange(len(order), dtype=torch.int32)
    assert torch.equal(row_id_map.view(3, 10).t(), row_map.view(10, 3))
    combined = te.moe_unpermute(out, row_id_map, probs, map_type="index")
    expected = reference.unpermute(x[order // 3].detach().float(), row_map.view(10, 3), probs.detach()).to(dtype)
    assert torch.equal(combined, expected)
    (dprobs,) = torch.autograd.grad(combined.float().sum(), probs)
    assert torch.equal(dprobs, torch.where(row_map.view(10, 3) >= 0, x.detach().float().sum(1, keepdim=True), 0))
    single = te.moe_unpermute(out, row_id_map, map_type="index")
    assert single.shape == (30, 8)
    assert torch.equal(single, reference.permute(out.detach(), torch.arange(len(out))[:, None], 31)[row_id_map.long()])


def test_codes_permute_under_transformer_engines_names():
    q = quire.quantize(random(10, 64), "mxfp8")
    mask = torch.rand(10, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    rows = int(mask.sum())
    out, _ = te.moe_permute(q, mask, rows)
    assert isinstance(out, te.MXFP8Tensor)
    assert torch.equal(out.dequantize(), te.moe_permute(q.dequantize(), mask, rows)[0])
    sizes, order = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 3, 1, 0])
    chunks = te.moe_sort_chunks_by_index(q, sizes, order)
    assert torch.equal(chunks.dequantize(), q.dequantize()[[3, 4, 5, 6, 7, 8, 9, 0, 1, 2]])


@st.composite
def chunks(draw):
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    return torch.tensor(sizes), torch.tensor(draw(st.permutations(range(len(sizes))))), draw(st.integers(0, 3))


@settled
@hypothesis.given(chunks(), st.sampled_from([torch.int32, torch.int64]))
def test_chunks_are_sorted_with_their_probs_and_rows_beyond_stay(given, dtype):
    sizes, order, beyond = given
    x, probs = random(int(sizes.sum()) + beyond, 4), random(int(sizes.sum()) + beyond, seed=1)
    inputs = x.requires_grad_(), probs.requires_grad_()
    out, moved = te.moe_sort_chunks_by_index_with_probs(*inputs, sizes.to(dtype), order.to(dtype))
    parts = torch.arange(len(x)).split([*sizes.tolist(), beyond])
    places = torch.cat([*[parts[i] for i in order.tolist()], parts[-1]])
    assert torch.equal(out, x[places]) and torch.equal(moved, probs[places])
    assert torch.equal(te.moe_sort_chunks_by_index(x, sizes.to(dtype), order.to(dtype)), out)
    douts = random(*x.shape, seed=2), random(*probs.shape, seed=3)
    back = places.argsort()
    for got, dout in zip(torch.autograd.grad((out, moved), inputs, douts), douts, strict=True):
        assert torch.equal(got, dout[back])


@settled
@hypothesis.given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.sampled_from([1, 4, 16]))
def test_padding_of_lists_and_tensors_and_back(m_splits, align):
    pad, unpad = te.Fp8Padding(len(m_splits), align), te.Fp8Unpadding(len(m_splits), align)
    x = random(sum(m_splits), 3).requires_grad_()
    out, padded = pad(x, m_splits)
    assert padded == [-(-size // align) * align for size in m_splits]
    parts = zip(x.split(m_splits), m_splits, padded, strict=True)
    expected = torch.cat([torch.nn.functional.pad(part, (0, 0, 0, long - short)) for part, short, long in parts])
    assert torch.equal(out, expected) and torch.equal(unpad(out, m_splits), x)
    assert (out is x) == (padded == m_splits)
    on_device, sizes = pad(x, torch.tensor(m_splits))
    assert sizes.tolist() == padded and len(on_device) == len(x) + len(m_splits) * (align - 1)
    assert torch.equal(on_device[: len(out)], out) and not on_device[len(out) :].any()
    assert torch.equal(unpad(on_device, torch.tensor(m_splits), num_out_tokens=len(x)), x)
    (dx,) = torch.autograd.grad(unpad(out * 2, m_splits).sum(), x)
    assert dx.eq(2).all()


def test_padding_is_to_what_the_recipe_asks_for():
    recipes = quire.recipe
    wanted = {
        recipes.MXFP8BlockScaling(): 32,
        recipes.NVFP4BlockScaling(): 128,
        recipes.Float8BlockScaling(): 16,
        recipes.DelayedScaling(): 16,
        recipes.CustomRecipe({"x": "fp8_row", "w": "mxfp4", "dy": "mxfp8"}.get): 128,
    }
    pad, x = te.Fp8Padding(2), torch.ones(3, 4)
    for recipe, align in wanted.items():
        with quire.autocast(recipe=recipe):
            assert pad(x, [1, 2])[1] == [align, align]
    assert pad(x, [1, 2])[1] == [32, 32]
    with pytest.raises(ValueError, match="Fp8Padding: m_splits must have num_gemms = 2 sizes, got 3"):
        pad(x, [1, 1, 1])
    with pytest.raises(TypeError, match="Fp8Unpadding: .* pass num_out_tokens="):
        te.Fp8Unpadding(2)(x, torch.tensor([1, 2]))


SCORING = [("softmax", True), ("softmax", False), ("sigmoid", False), ("sqrtsoftplus", False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function, pre_softmax", SCORING)
@pytest.mark.parametrize("groups", [(None, None), (4, 2)])
@pytest.mark.parametrize("topk", [1, 4])
def test_probs_and_routing_map_are_those_of_float64(function, pre_softmax, groups, topk, dtype):
    if topk == 1 and groups[0]:
        groups = (4, 1)
    logits = (random(40, 16, seed=4) * 2).to(dtype).requires_grad_()
    bias = torch.linspace(-0.1, 0.1, 16) if function != "softmax" else None
    arguments = (logits, topk, pre_softmax, *groups, 2.0, function, bias)
    probs, routing_map = te.fused_topk_with_score_function(*arguments)
    options = {"score_function": function, "scaling_factor": 2.0, "renormalize": function != "softmax" and topk > 1}
    options["softmax_after_topk"] = function == "softmax" and not pre_softmax
    choice = {"expert_bias": bias} | dict(zip(("num_groups", "group_topk"), groups, strict=True))
    weights, ids = reference.route(logits, topk, **options, **choice)
    assert torch.equal(routing_map, torch.zeros(40, 16, dtype=torch.bool).scatter(1, ids.long(), True))
    dense = torch.zeros(40, 16, dtype=torch.float64).scatter(1, ids.long(), weights)
    assert probs.dtype == dtype
    assert_rounded(probs, dense, dense, reference.roundings_of_weights(logits.detach().float()))
    doubles = logits.detach().double().requires_grad_()
    dprobs = random(40, 16, seed=5).to(dtype)
    (got,) = torch.autograd.grad(probs, logits, dprobs)
    exact = reference.weights_of(doubles, ids, **options)
    (expected,) = torch.autograd.grad(exact, doubles, dprobs.double().gather(1, ids.long()))
    dweights = dprobs.gather(1, ids.long())
    assert_rounded(got, expected, *reference.roundings_of_gradient(doubles, ids, dweights, **options))
    indices = torch.empty(40, topk, dtype=torch.int64)
    again, same = te.fused_topk_with_score_function(*arguments, topk_indices=indices)
    assert same is indices and torch.equal(indices, ids.long()) and torch.equal(again, probs)


@pytest.mark.parametrize("experts", [5, 8, 17])
def test_a_routing_map_may_be_bits(experts):
    logits = random(6, 3, experts)
    _, bytemap = te.fused_topk_with_score_function(logits, 3, True, None, None, None, "softmax", None, "bytemap")
    bitmap = te.fused_topk_with_score_function(logits, 3, True, None, None, None, "softmax", None, "bitmap_u8")[1]
    assert bitmap.dtype == torch.uint8 and bitmap.shape == (6, 3, -(-experts // 8))
    for e in range(experts):
        assert torch.equal(bitmap[..., e // 8] >> (e % 8) & 1 != 0, bytemap[..., e])
    assert not bitmap[..., -1].gt(2 ** ((experts - 1) % 8 + 1) - 1).any()
    assert torch.equal(te.fused_compute_score_for_moe_aux_loss(logits, 3, "softmax", 1)[0], bitmap)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_and_loss(function):
    logits = random(8, 8).bfloat16().requires_grad_()
    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(logits, 2, function)
    expected = torch.stack(
        [torch.from_numpy(reference.scores_of(function, x)) for x in logits.detach().cpu().double().numpy()]
    ).to(logits.device)
    expected /= expected.sum(-1, keepdim=True)
    assert scores.dtype == torch.float32
    roundings = reference.roundings_of_weights(logits.detach().float())
    assert_rounded(scores, expected, expected, roundings)
    for line, chosen in zip(expected.tolist(), routing_map, strict=True):
        assert chosen.nonzero()[:, 0].tolist() == sorted(reference.best(line, 2))
    load = routing_map.sum(0)
    exact = 0.01 * 8 / (2 * 8 * 8) * (expected.sum(0) * load).sum()
    for total in (8, torch.tensor(8)):
        loss = te.fused_moe_aux_loss(scores, load, total, 8, 2, 0.01)
        assert loss.shape == ()
        assert_rounded(loss, exact, exact.item(), roundings + 8 + 8 + 5)  # of two sums and five factors
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16 and logits.grad.any()


def test_the_loss_of_sequences_is_the_sum_of_theirs():
    probs, load = torch.rand(20, 2 * 6), torch.arange(12)
    both = te.fused_moe_aux_loss(probs, load, 20, 6, 2, 0.5)
    each = [te.fused_moe_aux_loss(probs[:, i : i + 6], load[i : i + 6], 20, 6, 2, 0.5) for i in (0, 6)]
    torch.testing.assert_close(both, sum(each))


@pytest.mark.cpu_only
def test_what_is_not_taken_says_so():
    logits, mask = random(4, 8), torch.ones(4, 8, dtype=torch.int32)
    topk = (logits, 2, False, None, None, None)
    with pytest.raises(ValueError, match="expert_bias is for score_function 'sigmoid'"):
        te.fused_topk_with_score_function(*topk, "softmax", torch.zeros(8))
    with pytest.raises(ValueError, match="routing_map_format must be 'bytemap' .* got 'words'"):
        te.fused_topk_with_score_function(*topk, "sigmoid", None, "words")
    with pytest.raises(ValueError, match="leave routing_map_format out"):
        te.fused_topk_with_score_function(*topk, "sigmoid", None, 1, torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(TypeError, match="at most 13 positional arguments, got 14"):
        te.fused_topk_with_score_function(*topk, *[None] * 8)
    with pytest.raises(ValueError, match="map_type must be 'mask' or 'index', got 'list'"):
        te.moe_permute(logits, mask, 32, map_type="list")
    with pytest.raises(ValueError, match="align_size must be positive, got 0"):
        te.moe_permute_and_pad_with_probs(logits, logits, mask, mask.sum(0), 0)
    with pytest.raises(RuntimeError, match="row_map must hold rows from 0 to 9"):
        te.moe_permute(logits, mask, 10)
    _, row_id_map = te.moe_permute(logits, mask, 32)
    with pytest.raises(ValueError, match="older name of merging_probs"):
        te.moe_unpermute(torch.ones(32, 8), row_id_map, logits, probs=logits)
    with pytest.warns(DeprecationWarning, match="pass merging_probs"):
        te.moe_unpermute(torch.ones(32, 8), row_id_map, probs=logits)
    with pytest.raises(RuntimeError, match="restore_shape is not that of the tokens"):
        te.moe_unpermute(torch.ones(32, 8), row_id_map, restore_shape=(5, 8))


WIDE = {
    "an index": (torch.tensor([[2**32], [1], [0]]), "topk_ids must be numbers of experts"),
    "a negative index": (torch.tensor([[-(2**32)], [1], [0]]), "topk_ids must be numbers of experts"),
    "the largest index": (torch.tensor([[2**63 - 1], [1], [0]]), "topk_ids must be numbers of experts"),
}


@pytest.mark.parametrize("name", WIDE)
def test_an_index_of_64_bits_does_not_wrap(name):
    index, message = WIDE[name]
    with pytest.raises(RuntimeError, match=message):
        te.moe_permute(random(3, 6), index, 3, map_type="index")


def test_an_index_that_is_no_integer_is_not_rounded():
    with pytest.raises(TypeError, match="routing_map must be int32 or int64, got torch.float32"):
        te.moe_permute(random(3, 6), torch.tensor([[0.5], [1.0], [0.0]]), 3, map_type="index")


@pytest.mark.cpu_only
@pytest.mark.parametrize("offset", [2**32, -(2**32), 2**63 - 1])
def test_offsets_of_padding_of_64_bits_do_not_wrap(offset):
    row_map = torch.tensor([[0, 3], [1, 4], [2, 5]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="row_map must hold rows from 0 to 5"):
        te.moe_unpermute(random(6, 6), row_map, pad_offsets=torch.tensor([0, offset]))
