"""The histogram of a router for quantile balancing, against moe/moe_reference.py in float64."""

import pytest
import torch

from python.moe import moe_reference as reference
from quire import te


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


BINS, BOUNDS = 20, (-0.3, 0.4)


def balanced(logits, topk, bias, histogram, *, bounds=BOUNDS, mode="two_kernel", **options):
    bounds = torch.tensor(bounds) if isinstance(bounds, tuple) else bounds
    given = {"qb_histogram": histogram, "qb_bin_bounds": bounds, "qb_histogram_mode": mode}
    return te.fused_topk_with_score_function(logits, topk, False, None, None, 2.0, "sigmoid", bias, **given | options)


def counted(logits, topk, bias):
    """The histogram in float64. No value is so near to the edge of a bin that float32 could find another one."""
    counts = torch.zeros(logits.shape[-1], BINS, dtype=torch.int32)
    for line in logits.detach().double().reshape(-1, logits.shape[-1]).numpy():
        scores = reference.scores_of("sigmoid", line)
        choice = scores + bias.double().numpy()
        required = choice[reference.best(choice, topk + 1)[-1]] - scores
        for expert, place in enumerate((required - BOUNDS[0]) / (BOUNDS[1] - BOUNDS[0]) * BINS):
            # Scores and biases below 2 have 8 roundings, of which a bin is 0.035: 8 * 2 * 2^-24 / 0.035 < 1e-4.
            assert abs(place - round(place)) > 1e-4 or round(place) not in range(1, BINS)
            counts[expert, min(max(int(place // 1), 0), BINS - 1)] += 1
    return counts


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["two_kernel", te.QBHistogramMode.FUSED_ATOMIC])
def test_the_biases_that_experts_would_need_are_counted(topk, dtype, mode):
    logits, bias = random(6, 7, 10, seed=3).to(dtype).requires_grad_(), torch.linspace(-0.1, 0.1, 10)
    histogram = torch.ones(10, 2 * BINS, dtype=torch.int32)[:, ::2]
    probs, chosen = balanced(logits, topk, bias, histogram, mode=mode)
    assert torch.equal(histogram, 1 + counted(logits, topk, bias))
    assert 0 < histogram[:, 1:-1].sum() < histogram.sum() and histogram[:, 0].max() > 1 and histogram[:, -1].max() > 1
    plain = te.fused_topk_with_score_function(logits, topk, False, None, None, 2.0, "sigmoid", bias)
    assert torch.equal(probs, plain[0]) and torch.equal(chosen, plain[1])
    dprobs = random(6, 7, 10, seed=4).to(dtype)
    got, expected = (torch.autograd.grad(one, logits, dprobs)[0] for one in (probs, plain[0]))
    assert torch.equal(got, expected)
    before, indices = histogram.clone(), torch.empty(6, 7, topk, dtype=torch.int16)
    with torch.inference_mode():
        assert balanced(logits, topk, bias, histogram, topk_indices=indices)[1] is indices
        balanced(logits[:0], topk, bias, histogram)
    assert torch.equal(histogram - before, before - 1)
    balanced(torch.full((1, 10), float("nan")), topk, bias, before)
    assert before.sum() == histogram.sum() - 42 * 10 + 10


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_graph_counts_the_biases_that_experts_would_need(compiler, backend):
    compiled, bias = compiler(balanced, backend), torch.linspace(-0.1, 0.1, 10)
    expected, histogram = (torch.zeros(10, BINS, dtype=torch.int32) for _ in range(2))
    bounds = torch.tensor(BOUNDS)
    for tokens in (7, 0, 30):
        logits = random(tokens, 10, seed=tokens).requires_grad_()
        torch._dynamo.decorators.mark_unbacked(logits, 0)
        probs, chosen = compiled(logits, 3, bias, histogram, bounds=bounds)
        plain = balanced(logits, 3, bias, expected)
        assert torch.equal(histogram, expected) and torch.equal(probs, plain[0]) and torch.equal(chosen, plain[1])
    assert compiler.graphs == 1
    with pytest.raises(RuntimeError, match="finite with lower < upper"):
        compiled(logits, 3, bias, histogram, bounds=bounds.fill_(1.0))


def test_what_quantile_balancing_does_not_take_says_so_and_counts_nothing():
    logits, bias, histogram = random(4, 8), torch.zeros(8), torch.zeros(8, BINS, dtype=torch.int32)
    for options, message in (
        ({"qb_bin_bounds": None}, "must be provided together"),
        ({"qb_histogram_mode": None}, "must be provided together"),
        ({"mode": "one"}, "qb_histogram_mode must be 'two_kernel' or 'fused_atomic', got 'one'"),
        ({"bias": None}, "only supports score_function 'sigmoid' with an expert_bias"),
        ({"topk": 8}, "topk must be from 1 to 7 for 8 experts, got 8"),
        ({"histogram": torch.zeros(7, BINS, dtype=torch.int32)}, r"\[num_experts, num_bins\] with num_experts = 8"),
        ({"histogram": torch.zeros(8, BINS)}, r"got torch.float32 \[8, 20\]"),
        ({"histogram": torch.zeros(8, 0, dtype=torch.int32)}, "at least one bin"),
        ({"bounds": (0.0, 0.5, 1.0)}, r"qb_bin_bounds must be float32 \[2\]"),
        ({"bounds": (1.0, 1.0)}, r"finite with lower < upper; got \[1.0, 1.0\]"),
        ({"bounds": (float("-inf"), 1.0)}, "finite with lower < upper"),
        ({"topk_indices": torch.zeros(4, 3, dtype=torch.int32), "routing_map_format": 1}, "leave routing_map_format"),
    ):
        given = {"topk": 2, "bias": bias, "histogram": histogram} | options
        with pytest.raises(ValueError, match=message):
            balanced(logits, **given)
    topk = (logits, 2, False)
    with pytest.raises(ValueError, match="got 'softmax', expert_bias=Tensor"):
        te.fused_topk_with_score_function(
            *topk, None, None, None, "softmax", bias, 0, None, histogram, torch.tensor(BOUNDS), "two_kernel"
        )
    with pytest.raises(ValueError, match="num_groups or group_topk"):
        te.fused_topk_with_score_function(
            *topk, 4, 2, None, "sigmoid", bias, 0, None, histogram, torch.tensor(BOUNDS), "two_kernel"
        )
    with pytest.raises(RuntimeError, match="expert_bias must be"):
        balanced(logits, 2, torch.zeros(7), histogram)
    assert not histogram.any()
