"""docs/moe.md: its example runs, in one graph and in every recipe, and its calls of models are taken."""

import re

import pytest
import torch
from torch._dynamo import decorators

import quire
from python.moe.moe_reference import roundings_of_gradient, roundings_of_weights
from steps import assert_rounded

PAGE = "docs/moe.md"


@pytest.fixture
def example(page):
    torch.manual_seed(0)
    scope = {"quire": quire}
    (own,) = (
        block for block in re.findall(r"```python\n(.*?)```", page(PAGE).text, re.DOTALL) if "def mixture" in block
    )
    exec(own, scope)
    return scope["mixture"], scope["experts"]


def inputs(tokens):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, width, generator=generator).requires_grad_() for width in (64, 8)]


def test_the_example_is_a_sum_over_experts_in_float64(example):
    """Of integers, so that only weights and what they multiply are rounded."""
    mixture, experts = example
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
    x, logits = inputs(30)
    x, dy = (torch.randint(-3, 4, (30, 64), generator=generator).float() for _ in range(2))
    y = mixture(x.requires_grad_(), logits)
    doubles = [t.detach().double().requires_grad_() for t in (x, logits)]
    probs = doubles[1].softmax(-1)
    ids = probs.topk(2)[1]
    chosen = torch.zeros(30, 8).scatter(1, ids, 1.0)
    weights = probs * chosen / (probs * chosen).sum(-1, keepdim=True)
    linears = [torch.nn.functional.linear(doubles[0], w.double(), b.double()) for w, b in parameters(experts)]
    linears = torch.stack(linears, 1)
    expected = (weights[..., None] * linears).sum(1)
    roundings = roundings_of_weights(logits.detach()) + 2  # a product with a weight, and a sum of two
    assert_rounded(y, expected.detach(), (weights[..., None] * linears.abs()).sum(1), roundings)
    exact_dx, exact_dlogits = torch.autograd.grad(expected, doubles, dy.double())
    dx, dlogits = torch.autograd.grad(y, (x, logits), dy)
    of_experts = torch.stack([dy.double().abs() @ w.detach().double().abs() for w, _ in parameters(experts)], 1)
    assert_rounded(dx, exact_dx, (weights[..., None] * of_experts).sum(1), roundings + 64)  # dy times a weight, summed
    dweights = (dy.double()[:, None] * linears).sum(-1).detach().gather(1, ids)
    assert_rounded(dlogits, exact_dlogits, *roundings_of_gradient(logits, ids, dweights, renormalize=True))


def parameters(experts):
    return [(getattr(experts, f"weight{e}"), getattr(experts, f"bias{e}")) for e in range(8)]


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_the_example_takes_one_graph_and_gives_the_bits_of_eager(example, recipe):
    mixture, experts = example
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(mixture, fullgraph=True, backend="aot_eager")
    for tokens in (0, 1, 40, 9):
        done = []
        for run, mark in ((mixture, False), (compiled, True)):
            given = inputs(tokens)
            experts.zero_grad()
            experts.sr_state[1] = 0
            if mark:
                for t in given:
                    decorators.mark_unbacked(t, 0)
            with quire.autocast(recipe=quire.recipe.from_name(recipe)):
                y = run(*given)
                y.backward(torch.ones(tokens, 64))
            done.append([y, *(t.grad for t in given), *(p.grad for p in experts.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*done, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_calls_of_models_are_taken(page):
    rows = page(PAGE).rows("Options of known models")
    assert len(rows) == 5
    for model, call in rows:
        expression = re.match(r"`(.*?)`", call)[1]
        weights, ids = eval(
            expression, {"route": quire.moe.route, "logits": torch.randn(5, 64), "bias": torch.zeros(64)}
        )
        assert weights.shape == ids.shape and ids.shape[0] == 5, model
