"""quire.moe.route and what keeps loads even, against float64."""

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import quire
from python.moe import moe_reference as reference
from quire import moe
from steps import assert_rounded

pytestmark = pytest.mark.any_device

#: Every option at least once.
OPTIONS = {
    "softmax": {"topk": 2},
    "softmax of one": {"topk": 1},
    "softmax of all": {"topk": 16, "renormalize": True},
    "mixtral": {"topk": 2, "renormalize": True},
    "softmax after": {"topk": 3, "softmax_after_topk": True, "scaling_factor": 0.5},
    "softmax after, in groups": {"topk": 4, "softmax_after_topk": True, "num_groups": 4, "group_topk": 2},
    "deepseek v2": {"topk": 6, "num_groups": 8, "group_topk": 3, "group_best": 1, "scaling_factor": 16.0},
    "deepseek v3": {
        **{"topk": 8, "score_function": "sigmoid", "renormalize": True, "num_groups": 4, "group_topk": 4},
        **{"scaling_factor": 2.5, "expert_bias": torch.linspace(-0.2, 0.2, 16)},
    },
    "sigmoid": {"topk": 3, "score_function": "sigmoid"},
    "sqrtsoftplus": {"topk": 3, "score_function": "sqrtsoftplus", "renormalize": True},
    "softmax with a bias": {"topk": 2, "expert_bias": torch.arange(16) * 0.01},
    "softmax after, with a bias": {"topk": 3, "softmax_after_topk": True, "expert_bias": torch.arange(16) % 3 * 0.5},
}


def logits_of(tokens, experts=16, seed=0, dtype=torch.float32):
    return (torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def there(options, device):
    """The options with the bias on the device."""
    bias = options.get("expert_bias")
    return options if bias is None else options | {"expert_bias": bias.to(device)}


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_choices_and_weights_are_those_of_float64(options, dtype, device):
    logits = logits_of(200).to(dtype)
    weights, ids = (part.cpu() for part in moe.route(logits.to(device), **there(options, device)))
    expected, expected_ids = reference.route(logits, **options)
    assert ids.dtype == torch.int32 and torch.equal(ids, expected_ids)
    assert weights.dtype == torch.float32
    assert_rounded(weights, expected, expected, reference.roundings_of_weights(logits.float()))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_float64(options, device):
    logits = logits_of(100, seed=1).requires_grad_()
    doubles = logits.detach().cpu().double().requires_grad_()
    weights, ids = moe.route(logits.to(device), **there(options, device))
    dweights = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    (got,) = torch.autograd.grad(weights, logits, dweights.to(device))
    options = {name: value for name, value in options.items() if name != "expert_bias"}
    expected = reference.weights_of(doubles, ids.cpu(), **options)
    (expected,) = torch.autograd.grad(expected, doubles, dweights.cpu().double())
    assert_rounded(got, expected, *reference.roundings_of_gradient(doubles, ids.cpu(), dweights.cpu(), **options))


def test_the_gradient_has_the_dtype_of_the_logits_and_experts_not_chosen_have_none():
    logits = logits_of(5, dtype=torch.bfloat16).requires_grad_()
    weights, ids = moe.route(logits, 2, score_function="sigmoid")
    weights.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    chosen = torch.zeros(5, 16).scatter(1, ids.long(), 1.0)
    assert torch.equal(logits.grad != 0, chosen != 0)


@st.composite
def coarse_logits(draw):
    """Few distinct values, so that scores are equal often and far apart otherwise."""
    tokens, experts = draw(st.integers(0, 6)), draw(st.sampled_from([1, 2, 6, 8, 33]))
    values = st.lists(st.integers(-3, 3), min_size=tokens * experts, max_size=tokens * experts)
    return torch.tensor(draw(values), dtype=torch.float32).reshape(tokens, experts)


def settings(examples=60):
    return hypothesis.settings(max_examples=examples, deadline=None, database=None, derandomize=True)


@pytest.mark.cpu_only
@settings()
@hypothesis.given(
    coarse_logits(),
    st.data(),
    st.sampled_from([("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]),
)
def test_equal_scores_go_to_the_smaller_number(logits, data, scoring):
    experts = logits.shape[1]
    options = {"score_function": scoring[0], "softmax_after_topk": scoring[1]}
    groups = data.draw(st.sampled_from([n for n in (1, 2, 4) if experts % n == 0]))
    if groups > 1:
        options |= {"num_groups": groups, "group_topk": data.draw(st.integers(1, groups)), "group_best": 1}
    topk = data.draw(st.integers(1, experts // groups * options.get("group_topk", 1)))
    weights, ids = moe.route(logits, topk, **options)
    expected, expected_ids = reference.route(logits, topk, **options)
    assert torch.equal(ids, expected_ids)
    assert_rounded(
        weights, expected, expected, 18
    )  # roundings_of_weights where distances are integers, which are exact


@settings()
@hypothesis.given(coarse_logits(), st.integers(0, 4), st.data())
def test_with_a_capacity_the_later_tokens_are_dropped(logits, capacity, data):
    topk = data.draw(st.integers(1, min(3, logits.shape[1])))
    weights, ids = moe.route(logits, topk)
    kept_weights, kept = moe.route(logits, topk, capacity=capacity)
    assert torch.equal(kept, reference.limit(ids, capacity))
    assert torch.equal(kept_weights, torch.where(kept >= 0, weights, 0.0))
    assert moe.tokens_per_expert(kept, logits.shape[1]).max() <= capacity
    limited_weights, limited = moe.limit_capacity(weights, ids, logits.shape[1], capacity)
    assert torch.equal(limited_weights, kept_weights) and torch.equal(limited, kept)


def test_dropped_weights_have_no_gradient_and_the_others_theirs():
    logits = logits_of(20, 4).requires_grad_()
    weights, ids = moe.route(logits, 2, capacity=3)
    assert (ids < 0).any() and (ids >= 0).any()
    (got,) = torch.autograd.grad(weights.sum(), logits)
    plain, _ = moe.route(logits, 2)
    (expected,) = torch.autograd.grad((plain * (ids >= 0)).sum(), logits)
    assert torch.equal(got, expected)


def test_leading_dimensions_are_kept_and_nothing_is_routed_for_no_tokens():
    logits = logits_of(24).reshape(2, 3, 4, 16)
    weights, ids = moe.route(logits, 2)
    flat_weights, flat_ids = moe.route(logits.reshape(24, 16), 2)
    assert weights.shape == ids.shape == (2, 3, 4, 2)
    assert torch.equal(weights.reshape(24, 2), flat_weights) and torch.equal(ids.reshape(24, 2), flat_ids)
    empty = torch.zeros(0, 16, requires_grad=True)
    weights, ids = moe.route(empty, 2, capacity=1)
    assert weights.shape == ids.shape == (0, 2)
    weights.sum().backward()
    assert empty.grad.shape == (0, 16)


def test_strided_logits_give_the_bits_of_contiguous_ones():
    logits = logits_of(64, 32)[::2, 8:24]
    for got, expected in zip(moe.route(logits, 3), moe.route(logits.contiguous(), 3), strict=True):
        assert torch.equal(got, expected)


def test_bits_do_not_depend_on_threads():
    logits = logits_of(3000, 64).requires_grad_()
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            weights, ids = moe.route(logits, 4, renormalize=True)
            results.append((weights, ids, *torch.autograd.grad(weights.square().sum(), logits)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nan_is_chosen_last_and_stays_visible():
    logits = torch.tensor([[0.0, float("nan"), 1.0, -1.0], [float("-inf"), 3.0, float("-inf"), 2.0]])
    weights, ids = moe.route(logits, 3, score_function="sigmoid")
    assert ids.tolist() == [[2, 0, 3], [1, 3, 0]] and not weights.isnan().any()
    weights, ids = moe.route(logits, 4, score_function="sigmoid")
    assert ids[0].tolist() == [2, 0, 3, 1] and weights[0, 3].isnan()
    weights, ids = moe.route(logits, 2)
    assert weights[0].isnan().all() and ids.tolist() == [[0, 1], [1, 3]]
    torch.testing.assert_close(weights[1].double(), torch.tensor([1.0, 0], dtype=torch.double).sub(2).softmax(0))


@pytest.mark.cpu_only
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
def test_golden_routing(golden, recipe):
    case = golden.get(f"moe/{recipe}")
    x, w = (torch.from_numpy(case[name].copy()).view(torch.bfloat16) for name in ("x", "w_router"))
    logits = (x.double() @ w.double().t()).float()
    weights, ids = moe.route(logits, 2, renormalize=True)
    assert torch.equal(ids, torch.from_numpy(case["expert_index"].copy()))
    expected = torch.from_numpy(case["expert_weight"].copy()).double()  # of float64, and rounded once to float32
    chosen = logits.gather(-1, ids.long())  # the greatest logit is among them
    assert_rounded(weights, expected, expected, reference.roundings_of_weights(chosen) + 1)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_load_balancing_loss_is_that_of_float64(function):
    logits = logits_of(8, 8).requires_grad_()
    weights, ids = moe.route(logits, 2, score_function=function)
    load = moe.tokens_per_expert(ids, 8)
    assert load.dtype == torch.int32 and load.tolist() == torch.bincount(ids.flatten(), minlength=8).tolist()
    loss = moe.load_balancing_loss(moe.scores(logits, function), load, topk=2, coeff=0.1)
    doubles = logits.detach().double().requires_grad_()
    lines = [torch.from_numpy(reference.scores_of(function, line)) for line in doubles.detach().cpu().numpy()]
    probs = torch.stack(lines).to(logits.device)
    probs = probs / probs.sum(-1, keepdim=True)
    by_hand = 0.1 * 8 / (2 * 8**2) * (probs.sum(0) * load).sum()
    roundings = reference.roundings_of_weights(logits.detach()) + 8 + 8 + 5  # of two sums and five factors
    assert_rounded(loss, by_hand, by_hand.item(), roundings)
    functions = {"softmax": lambda x: x, "sigmoid": torch.sigmoid}
    functions["sqrtsoftplus"] = lambda x: torch.nn.functional.softplus(x).sqrt()
    values = doubles.softmax(-1) if function == "softmax" else functions[function](doubles)
    factors = 0.1 * 8 / (2 * 8**2) * load.double()
    expected = ((values / values.sum(-1, keepdim=True)).sum(0) * factors).sum()
    (got,), (wanted,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, doubles)
    every = torch.arange(8).expand(8, 8), factors.expand(8, 8), function, function != "softmax"
    magnitude, roundings = reference.roundings_of_gradient(doubles, *every)
    assert_rounded(got, wanted, magnitude, roundings + 5)


def test_an_even_load_costs_coeff_and_no_tokens_cost_nothing():
    even = moe.load_balancing_loss(torch.full((12, 6), 1 / 6), torch.full((6,), 4), topk=2, coeff=0.5)
    torch.testing.assert_close(even, torch.tensor(0.5))
    probs = torch.zeros(0, 6, requires_grad=True)
    nothing = moe.load_balancing_loss(probs, torch.zeros(6), topk=2)
    nothing.backward()
    assert nothing == 0 and probs.grad.shape == (0, 6)
    probs = torch.rand(12, 6)
    whole = moe.load_balancing_loss(probs, torch.full((6,), 4), topk=2, total_num_tokens=torch.tensor(24))
    torch.testing.assert_close(whole, moe.load_balancing_loss(probs, torch.full((6,), 4), topk=2) / 4)


def test_the_bias_of_a_loaded_expert_falls_and_of_an_idle_one_rises():
    bias = torch.tensor([0.5, -0.25, 0.0, 1.0])
    same = moe.update_expert_bias_(bias, torch.tensor([3, 0, 2, 3], dtype=torch.int32), 0.125)
    assert same is bias and bias.tolist() == [0.375, -0.125, 0.0, 0.875]
    parameter = torch.nn.Parameter(torch.zeros(2))
    moe.update_expert_bias_(parameter, torch.tensor([2**30, 2**30 + 1], dtype=torch.int32), 1.0)
    assert parameter.grad_fn is None and parameter.tolist() == [1.0, -1.0]


def test_balancing_by_bias_evens_the_load():
    logits, bias = logits_of(500, 8) + torch.linspace(0, 2, 8), torch.zeros(8)
    loads = []
    for _ in range(200):
        _, ids = moe.route(logits, 2, score_function="sigmoid", expert_bias=bias)
        loads.append(moe.tokens_per_expert(ids, 8))
        moe.update_expert_bias_(bias, loads[-1], 0.01)
    assert loads[0].max() > 200 and loads[-1].max() < 150


def test_recipes_do_not_touch_routing():
    logits = logits_of(9)
    with quire.autocast(recipe=quire.recipe.NVFP4BlockScaling()):
        inside = moe.route(logits, 2)
    assert all(torch.equal(a, b) for a, b in zip(inside, moe.route(logits, 2), strict=True))


LOGITS, IDS, WEIGHTS = torch.randn(4, 16), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
PROBS, LOADS = torch.rand(4, 8), torch.tensor([1, 2, 0, 0, 0, 5, 0, 0])
BIAS, META = torch.zeros(8), torch.zeros((), device="meta")
NAN, INF = float("nan"), float("inf")


def route(**options):
    return moe.route(LOGITS, options.pop("topk", 2), **options)


def loss(probs=PROBS, loads=LOADS, **options):
    return moe.load_balancing_loss(probs, loads, **{"topk": 2} | options)


def update(bias=BIAS, loads=LOADS, rate=0.1):
    return moe.update_expert_bias_(bias, loads, rate)


#: What somebody does, the error, and words of it.
WRONG = {
    "half of the groups": (
        lambda: route(num_groups=4),
        RuntimeError,
        "num_groups and group_topk belong together, got 4",
    ),
    "groups of nothing": (
        lambda: route(group_topk=2),
        RuntimeError,
        "belong together, got None and 2; pass both or no",
    ),
    "no groups": (
        lambda: route(num_groups=0, group_topk=1),
        RuntimeError,
        "num_groups must be at least 1 or None, got 0",
    ),
    "negative groups": (
        lambda: route(num_groups=-1, group_topk=1),
        RuntimeError,
        "num_groups must be at least 1 or None, got -1",
    ),
    "no group for a token": (
        lambda: route(num_groups=4, group_topk=0),
        RuntimeError,
        "group_topk must be at least 1 or None, got 0",
    ),
    "too many groups": (
        lambda: route(num_groups=4, group_topk=5),
        RuntimeError,
        "group_topk must .* num_groups = 4, got 5",
    ),
    "uneven groups": (
        lambda: route(num_groups=3, group_topk=1),
        RuntimeError,
        "divide the number of experts, 16, got 3",
    ),
    "the best of no groups": (lambda: route(group_best=1), RuntimeError, "group_best is for groups; pass num_groups"),
    "none of a group": (
        lambda: route(num_groups=4, group_topk=3),
        RuntimeError,
        "group_best would be topk // group_topk = 2 // 3 = 0; pass group_best",
    ),
    "softmax of sigmoid": (
        lambda: route(score_function="sigmoid", softmax_after_topk=True),
        RuntimeError,
        "softmax_after_topk is for softmax, got 'sigmoid'",
    ),
    "two sums of 1": (
        lambda: route(softmax_after_topk=True, renormalize=True),
        RuntimeError,
        "renormalize has nothing to do after softmax_after_topk",
    ),
    "a text for a bool": (
        lambda: route(softmax_after_topk="a"),
        TypeError,
        "softmax_after_topk must be a bool, got 'a'",
    ),
    "nothing for a bool": (lambda: route(renormalize=None), TypeError, "renormalize must be a bool, got None"),
    "a huge factor": (lambda: route(scaling_factor=2**2000), RuntimeError, "scaling_factor must be .* got a.* int"),
    "an infinite factor": (
        lambda: route(scaling_factor=INF),
        RuntimeError,
        "scaling_factor must be finite .* got inf",
    ),
    "a factor of NaN": (lambda: route(scaling_factor=NAN), RuntimeError, "scaling_factor must be .* got nan"),
    "a negative factor": (
        lambda: route(scaling_factor=-1),
        RuntimeError,
        "scaling_factor must .* not negative, got -1",
    ),
    "weights of another dtype": (
        lambda: moe.limit_capacity(WEIGHTS.double(), IDS, 4, 1),
        RuntimeError,
        "topk_weights must be float32, got torch.float64",
    ),
    "weights of another device": (
        lambda: moe.limit_capacity(WEIGHTS.to("meta"), IDS, 4, 1),
        RuntimeError,
        "must be on one device, got meta and",
    ),
    "scores of integers": (lambda: moe.scores(LOGITS.int()), TypeError, "logits must be float32, .* got torch.int32"),
    "scores of bools": (lambda: moe.scores(LOGITS > 0), TypeError, "logits must be float32, .* got torch.bool"),
    "scores of float64": (
        lambda: moe.scores(LOGITS.double()),
        TypeError,
        "logits must be .* got torch.float64; convert",
    ),
    "scores of complex": (lambda: moe.scores(LOGITS.cfloat()), TypeError, "logits must be .* got torch.complex64"),
    "scores of sparse": (lambda: moe.scores(LOGITS.to_sparse()), TypeError, "logits must be a dense tensor"),
    "scores of a scalar": (lambda: moe.scores(torch.tensor(1.0)), ValueError, "at least 1 dimension, got a scalar"),
    "no experts": (lambda: moe.tokens_per_expert(IDS, None), TypeError, "num_experts must be an int, got None"),
    "a topk of 0": (lambda: loss(topk=0), ValueError, "topk must be from 1 to the number of experts, 8, got 0"),
    "a negative topk": (lambda: loss(topk=-1), ValueError, "topk must be from 1 to .* 8, got -1"),
    "more than all": (lambda: loss(topk=9), ValueError, "topk must be from 1 to .* 8, got 9"),
    "a part of an expert": (lambda: loss(topk=1.5), TypeError, "topk must be an int, got 1.5"),
    "a coefficient of NaN": (lambda: loss(coeff=NAN), ValueError, "coeff must be finite, got nan"),
    "an infinite coefficient": (lambda: loss(coeff=-INF), ValueError, "coeff must be finite, got -inf"),
    "a text for a coefficient": (lambda: loss(coeff="a"), TypeError, "coeff must be a number, got 'a'"),
    "negative tokens": (lambda: loss(total_num_tokens=-1), ValueError, "total_num_tokens must be at least 0, got -1"),
    "half a token": (
        lambda: loss(total_num_tokens=1.5),
        TypeError,
        "total_num_tokens must be an int or a tensor, got 1.5",
    ),
    "several totals": (
        lambda: loss(total_num_tokens=BIAS),
        ValueError,
        r"total_num_tokens must be one number, .* \[8\]",
    ),
    "a total of none": (
        lambda: loss(total_num_tokens=META),
        ValueError,
        "total_num_tokens must have a value, got a .* meta",
    ),
    "loads that are bools": (lambda: loss(loads=LOADS > 0), ValueError, "must hold numbers, got torch.bool"),
    "loads that are complex": (
        lambda: loss(loads=LOADS.cfloat()),
        ValueError,
        "must hold numbers, got torch.complex64",
    ),
    "probabilities that are none": (
        lambda: loss(PROBS > 0),
        ValueError,
        "probs must be floating-point, got torch.bool",
    ),
    "loads elsewhere": (lambda: loss(loads=LOADS.to("meta")), ValueError, "must be on one device; got meta and"),
    "loads of a bias elsewhere": (
        lambda: update(loads=LOADS.to("meta")),
        ValueError,
        "must be on one device; got meta and",
    ),
    "a rate of NaN": (lambda: update(rate=NAN), ValueError, "rate must be finite in torch.float32, got nan"),
    "a rate of too much": (
        lambda: update(BIAS.half(), rate=1e6),
        ValueError,
        "rate must be finite in torch.float16, got 1",
    ),
    "a text for a rate": (lambda: update(rate="a"), TypeError, "rate must be a number, got 'a'"),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("wrong, error, words", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_in_words(wrong, error, words):
    with pytest.raises(error, match=rf"^(route|limit_capacity|scores|\w+_\w*): .*{words}"):
        wrong()
    assert not BIAS.any()


OF_GROUPS = [
    {"num_groups": groups, "group_topk": topk, "group_best": best}
    for groups in (None, 1, 2, 3, 4)
    for topk in (None, 1, 2, 5)
    for best in (None, 1, 4, 5)
]


def refuses(call):
    try:
        call()
    except RuntimeError:
        return True
    return False


@pytest.mark.cpu_only
def test_options_are_refused_where_the_operator_refuses_their_text():
    for topk, options in itertools.product((1, 2, 5), OF_GROUPS):
        words = [f"{name}={value}" for name, value in options.items() if value is not None]
        text = ":".join(["softmax", f"topk={topk}", *words])
        expected = refuses(lambda text=text: quire.functional.route(LOGITS, None, text))
        for call in (
            lambda topk=topk, options=options: moe.routing.routing_text(topk, num_experts=16, **options),
            lambda topk=topk, options=options: moe.route(LOGITS, topk, **options),
        ):
            assert refuses(call) is expected, text


@pytest.mark.cpu_only
def test_totals_of_no_tokens_and_of_rows_that_are_padding_are_taken():
    assert moe.load_balancing_loss(PROBS, torch.zeros(8), topk=2, total_num_tokens=0) == 0
    assert moe.load_balancing_loss(PROBS[:0], torch.zeros(8), topk=2, total_num_tokens=0) == 0
    assert loss(total_num_tokens=3).isfinite()
    assert torch.equal(loss(total_num_tokens=torch.tensor([4])), loss())
