"""quire.moe.permute and unpermute: rows by expert and back, against sorting and summing by hand."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import quire
from python.moe import moe_reference as reference
from quire import moe
from steps import assert_rounded

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def loads(draw):
    """topk_ids and the number of experts: any load, one expert for all tokens, no expert, duplicates."""
    tokens, topk, experts = draw(st.integers(0, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    one = draw(st.integers(-1, experts - 1))
    ids = draw(st.sampled_from([st.integers(-1, experts - 1), st.integers(0, experts - 1), st.just(one)]))
    values = draw(st.lists(ids, min_size=tokens * topk, max_size=tokens * topk))
    return torch.tensor(values, dtype=torch.int32).reshape(tokens, topk), experts


def settled(test):
    # Where a test computes is the same for all of its examples.
    shared = [hypothesis.HealthCheck.function_scoped_fixture]
    return hypothesis.settings(
        max_examples=80, deadline=None, database=None, derandomize=True, suppress_health_check=shared
    )(test)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape, seed=0):
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


@settled
@hypothesis.given(loads(), st.sampled_from(FLOATS), st.sampled_from([1, 5, 40]))
def test_rows_are_sorted_by_expert_in_the_order_of_tokens(device, load, dtype, width):
    ids, experts = load
    x = random(len(ids), width, dtype=dtype)
    row_map, offsets = reference.rows_by_expert(ids, experts)
    got = moe.permute(x.to(device), ids.to(device), experts)
    got = type(got)(*(part.cpu() for part in got))
    assert got.offsets.dtype == got.row_map.dtype == torch.int32
    assert torch.equal(got.row_map, row_map) and torch.equal(got.offsets, offsets)
    assert torch.equal(got.rows, reference.permute(x, row_map, ids.numel()))
    assert not got.rows[offsets[-1] :].any()
    for expert in range(experts):
        first = offsets[expert - 1] if expert else 0
        tokens = (ids == expert).nonzero()[:, 0]
        assert torch.equal(got.rows[first : offsets[expert]], x[tokens])


@settled
@hypothesis.given(loads(), st.sampled_from(FLOATS), st.booleans())
def test_rows_are_summed_in_the_order_of_a_tokens_experts_in_float32(device, load, dtype, weighted):
    ids, experts = load
    row_map, _ = reference.rows_by_expert(ids, experts)
    y, weights = random(ids.numel(), 33, dtype=dtype), random(*ids.shape, seed=1) if weighted else None
    sums = reference.unpermute(y.float(), row_map, weights)
    there = [None if part is None else part.to(device) for part in (y, row_map, weights)]
    assert torch.equal(moe.unpermute(*there).cpu(), sums.to(dtype))
    wide = [y.double(), None if weights is None else weights.double()]
    exact, magnitude = (
        reference.unpermute(values, row_map, factors)
        for values, factors in (wide, [None if part is None else part.abs() for part in wide])
    )
    assert_rounded(sums, exact, magnitude, ids.shape[1])


def grads(y, dy, *inputs):
    return torch.autograd.grad(y, inputs, dy)


@settled
@hypothesis.given(loads(), st.booleans())
def test_gradients_are_those_of_float64(device, load, weighted):
    """Of integers, whose products and sums float32 has exactly."""
    ids, experts = load
    row_map, _ = reference.rows_by_expert(ids, experts)
    x, y = integers(len(ids), 7), integers(ids.numel(), 7, seed=2)
    weights = integers(*ids.shape, seed=1)
    ours = [t.clone().to(device).requires_grad_() for t in (x, y, weights)]
    theirs = [t.double().requires_grad_() for t in (x, y, weights)]
    here = (row_map >= 0).nonzero().tolist()
    one_hot = torch.zeros(*ids.shape, ids.numel(), dtype=torch.float64)
    for t, s in here:
        one_hot[t, s, row_map[t, s]] = 1
    x64, y64, weights64 = theirs
    factor = weights64 if weighted else torch.ones_like(weights64)
    permuted64 = torch.einsum("tsr,ts,tk->rk", one_hot, factor, x64)
    combined64 = torch.einsum("tsr,ts,rk->tk", one_hot, factor, y64)
    given_weights = ours[2] if weighted else None
    permuted = moe.permute(ours[0], ids.to(device), experts, weights=given_weights).rows
    combined = moe.unpermute(ours[1], row_map.to(device), given_weights)
    for result, expected, index in ((permuted, permuted64, 0), (combined, combined64, 1)):
        assert torch.equal(result.cpu().double(), expected)
        wanted = [index, 2] if weighted else [index]
        dy = integers(*result.shape, seed=3)
        got = grads(result, dy.to(device), *[ours[i] for i in wanted])
        exact = grads(expected, dy.double(), *[theirs[i] for i in wanted])
        for a, b in zip(got, exact, strict=True):
            assert torch.equal(a.cpu().double(), b)


def test_gradients_in_bfloat16_are_rounded_once():
    ids = torch.tensor([[0, 1, 2], [2, 0, 1]], dtype=torch.int32)
    x = random(2, 64, dtype=torch.bfloat16).requires_grad_()
    rows, _, row_map = moe.permute(x, ids, 3)
    dy = random(6, 64, dtype=torch.bfloat16, seed=1)
    (dx,) = grads(rows, dy, x)
    assert torch.equal(dx, reference.unpermute(dy.float(), row_map).bfloat16())


def test_the_way_there_and_back_gives_each_row_as_it_was():
    ids = torch.tensor([[1], [0], [1], [-1]], dtype=torch.int32)
    for dtype in FLOATS:
        x = torch.tensor([[0.0, -0.0], [1e-40, float("inf")], [float("-inf"), 3.0], [5.0, 5.0]]).to(dtype)
        rows, _, row_map = moe.permute(x, ids, 2)
        back = moe.unpermute(rows, row_map)
        assert torch.equal(back[:3].view(torch.uint8), x[:3].view(torch.uint8)) and not back[3].any()


def test_fewer_rows_may_be_asked_for_where_experts_have_a_capacity():
    logits, x = random(40, 4), random(40, 8)
    weights, ids = moe.route(logits, 2, capacity=6)
    rows, offsets, row_map = moe.permute(x, ids, 4, num_rows=24)
    assert rows.shape == (24, 8) and offsets[-1] <= 24
    assert torch.equal(rows, moe.permute(x, ids, 4).rows[:24])
    combined = moe.unpermute(rows, row_map, weights)
    expected = x * weights.sum(1, keepdim=True)
    torch.testing.assert_close(combined, expected)


def test_strided_inputs_give_the_bits_of_contiguous_ones():
    ids = torch.randint(-1, 5, (30, 6), dtype=torch.int32)[:, ::2]
    x = random(60, 24)[::2, 3:19]
    weights = random(30, 6)[:, 1::2]
    got = moe.permute(x, ids, 5, weights=weights)
    expected = moe.permute(x.contiguous(), ids.contiguous(), 5, weights=weights.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    y = random(16, 90).t()
    back = moe.unpermute(y, got.row_map, weights)
    assert torch.equal(back, moe.unpermute(y.contiguous(), got.row_map, weights.contiguous()))


def test_bits_do_not_depend_on_threads():
    ids = torch.randint(0, 8, (500, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x, weights = random(500, 200).requires_grad_(), random(500, 4, seed=1).requires_grad_()
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            rows, _, row_map = moe.permute(x, ids, 8)
            back = moe.unpermute(rows, row_map, weights)
            results.append((rows, back, *grads(back, torch.ones_like(back), x, weights)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_backward_keeps_rows_only_where_weights_need_a_gradient():
    ids = torch.zeros(4, 1, dtype=torch.int32)
    x, y = random(4, 1000).requires_grad_(), random(4, 1000).requires_grad_()
    weights = torch.ones(4, 1)
    row_map = moe.permute(x.detach(), ids, 1).row_map

    def kept(function):
        sizes = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t)
        with hooks:
            function()
        return sum(sizes)

    assert kept(lambda: moe.permute(x, ids, 1, weights=weights)) < 100
    assert kept(lambda: moe.unpermute(y, row_map, weights)) < 100
    weights.requires_grad_()
    assert kept(lambda: moe.permute(x, ids, 1, weights=weights)) >= 4000
    assert kept(lambda: moe.unpermute(y, row_map, weights)) >= 4000


@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_golden_tokens_of_experts_and_their_combination(golden, recipe):
    case = golden.get(f"moe/{recipe}")
    bf16 = {name: torch.from_numpy(case[name].copy()).view(torch.bfloat16) for name in ["x"]}
    ids, weights = (torch.from_numpy(case[name].copy()) for name in ("expert_index", "expert_weight"))
    rows, offsets, row_map = moe.permute(bf16["x"], ids, 5)
    outs, first = [], 0
    for expert, end in enumerate(offsets.tolist()):
        assert torch.equal(rows[first:end], bf16["x"][torch.from_numpy(case[f"tokens_{expert}"].copy())])
        outs.append(torch.from_numpy(case[f"out_{expert}"].copy()).view(torch.bfloat16))
        first = end
    y = moe.unpermute(torch.cat(outs).float(), row_map, weights)
    magnitude = reference.unpermute(torch.cat(outs).double().abs(), row_map, weights.double())
    # y is of weights in float64, which the file has rounded; then there are products, and a sum.
    assert_rounded(y, torch.from_numpy(case["y"].copy()), magnitude, 3)


ROWWISE = ["fp8_tensor", "fp8_row", "fp8_block", "fp8_block:pow2", "mxfp8", "mxfp8:e5m2", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("spec", [*ROWWISE, "nvfp4:row_scaled", "nvfp4:rht:sr", "nvfp4:4over6=mse"])
@pytest.mark.parametrize("shape", [(10, 160), (1, 32), (0, 32), (7, 33)], ids=str)
def test_codes_move_with_their_scales(spec, shape):
    x = random(*shape) * torch.logspace(-2, 2, shape[0])[:, None]
    q = quire.quantize(x, spec, True, True, seed=3)
    ids = torch.randint(-1, 3, (shape[0], 2), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    got = moe.permute(q, ids, 3)
    expected = moe.permute(q.dequantize(), ids, 3)
    assert isinstance(got.rows, quire.QuantizedTensor) and got.rows.spec == q.spec
    assert got.rows.shape == expected.rows.shape and got.rows.columnwise_data is None
    assert got.rows.buffers().keys() == {name for name in q.buffers() if name.startswith("rowwise")}
    rebuilt = quire.QuantizedTensor.from_buffers(got.rows.buffers(), q.spec, got.rows.shape)
    values = rebuilt.dequantize()
    assert torch.equal(values, expected.rows)
    assert torch.equal(got.row_map, expected.row_map) and torch.equal(got.offsets, expected.offsets)


@pytest.mark.parametrize(
    "spec", ["fp8_block:128x128", "mxfp8:32x32", "nvfp4:16x16", "mxfp8:swizzled", "nvfp4:interleaved"]
)
def test_rows_that_share_scales_are_refused_in_words(spec):
    q = quire.quantize(random(10, 160), spec)
    with pytest.raises(NotImplementedError, match=f"rows of {spec} share scales .*; permute, then quantize"):
        moe.permute(q, torch.zeros(10, 1, dtype=torch.int32), 1)


def test_codes_that_cannot_be_permuted_are_refused_in_words():
    x, ids = random(10, 160), torch.zeros(10, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="a matrix with rowwise codes"):
        moe.permute(quire.quantize(x, "mxfp8", False, True), ids, 1)
    with pytest.raises(NotImplementedError, match="cannot be multiplied by weights; pass them to unpermute"):
        moe.permute(quire.quantize(x, "mxfp8"), ids, 1, weights=torch.ones(10, 1))
    with pytest.raises(NotImplementedError, match="codes have no gradient.*detach"):
        moe.permute(quire.quantize(x.requires_grad_(), "mxfp8"), ids, 1)
    leaf = quire.quantize(x.detach(), "mxfp8").requires_grad_()
    with pytest.raises(NotImplementedError, match="codes have no gradient.*detach"):
        moe.permute(leaf, ids, 1)
    with torch.no_grad():
        assert isinstance(moe.permute(leaf, ids, 1).rows, quire.QuantizedTensor)
    with pytest.raises(TypeError, match="unpermute"):
        moe.unpermute(quire.quantize(x.detach(), "mxfp8"), ids)


WRONG = {
    "nothing": ({"x": None}, TypeError, "x must be a tensor .*, got None"),
    "no experts": ({"num_experts": None}, TypeError, "num_experts must be an int, got None"),
    "a text for rows": ({"num_rows": "a"}, TypeError, "num_rows must be an int.*got 'a'"),
    "a number for weights": ({"weights": 1.0}, TypeError, "weights must be a tensor, got 1.0"),
}


@pytest.mark.parametrize("changed, error, words", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_in_words(changed, error, words):
    good = {"x": torch.ones(4, 8), "topk_ids": torch.zeros(4, 2, dtype=torch.int32), "num_experts": 4}
    with pytest.raises(error, match=f"^permute: {words}"):
        moe.permute(**good | changed)
