"""Mixtures with experts on several processes: what does not fit, what fails, and what is sent. For functions that
tests/ranks.py runs."""

import os
from datetime import timedelta

import torch
from torch import distributed
from torch._dynamo.decorators import mark_unbacked
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from every_recipe import TABLE
from python.distributed.expert_ranks import EXPERTS, HIDDEN, INNER, WAYS, Case, data, own_tokens, passes, under
from python.distributed.failing_ranks import SHORT, leave, message
from quire.moe import permute, unpermute


def of_size_one(rank, case):
    """A group of this process alone computes what a mixture without a group does."""
    groups = [distributed.new_group([other]) for other in range(distributed.get_world_size())]
    whole, part = case.make(), case.make(ep_group=groups[rank], **case.ep)
    quire.set_rng_state(part, quire.rng_state(whole))
    xs, dys = data(case)
    found, expected = (passes(layer, xs, dys, TABLE[case.recipe], layer) for layer in (part, whole))
    for one, other in zip(found, expected, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def overflow(rank, way):
    """Rank 0 has more rows for one process than fit. What every rank raises."""
    case = Case("mxfp8", (20, 3), ep={"ep_capacity": 8})
    _, part = case.mixtures()
    run = WAYS[way](part)
    for count in (3, 20, 3):
        x = torch.randn(count if rank == 0 else 3, HIDDEN)
        mark_unbacked(x, 0)
        with under(case.recipe):
            if count == 3:
                run(x)
                continue
            try:
                run(x)
            except RuntimeError as error:
                said = str(error)
    return said


def drops(rank, capacity):
    """The rows that exceed the capacity of this process for another one are dropped, in the order of tokens, and the
    rest is what one process computes."""
    case = Case("mxfp8", (20, 9), ep={"ep_capacity": capacity, "ep_overflow": "drop"})
    whole, part = case.mixtures()
    x = data(case)[0][0]
    with torch.no_grad(), under(case.recipe):
        y, routing = part(own_tokens(case, x), return_routing=True)
        _, undropped = whole(own_tokens(case, x), return_routing=True)
    sent, kept = [0, 0], []
    for expert in undropped.topk_ids.flatten().tolist():
        process = expert // (EXPERTS // 2)
        kept.append(expert if sent[process] < capacity else -1)
        sent[process] += 1
    assert routing.topk_ids.flatten().tolist() == kept
    assert torch.equal(routing.tokens_per_expert, torch.bincount(undropped.topk_ids.flatten(), minlength=EXPERTS))
    assert torch.equal(routing.topk_weights, torch.where(routing.topk_ids >= 0, undropped.topk_weights, 0.0))
    everywhere = [None, None]
    distributed.all_gather_object(everywhere, (routing.topk_ids, routing.topk_weights))
    ids, weights = (torch.cat(each) for each in zip(*everywhere, strict=True))
    rows, offsets, row_map = permute(x, ids, EXPERTS)
    splits = offsets.diff(prepend=offsets.new_zeros(1))
    with torch.no_grad(), under(case.recipe):
        h = quire.functional.activation(whole.fc1(rows, splits), "swiglu", x.dtype)[0]
        wanted = unpermute(whole.fc2(h, splits), row_map, weights)
    assert torch.equal(y, own_tokens(case, wanted))
    return kept.count(-1)


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        group = distributed.new_group(timeout=timedelta(seconds=SHORT))
        self.mixture = quire.MoE(HIDDEN, INNER, EXPERTS, ep_group=group, **options)

    def forward(self, x):
        return self.mixture(x)


def other_rank(rank, where, act):
    """act: "ends" or "hangs", what rank 1 does instead of the forward or of the backward pass."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, HIDDEN, requires_grad=True)
    y = model(x)
    if rank == 1:
        return leave(act)
    return message(y.sum().backward if where == "backward" else lambda: model(x))


def differs(rank, change):
    """Rank 1 has another recipe, and ranks are compared."""
    os.environ["QUIRE_CHECK_RANKS"] = "1"
    try:
        torch.manual_seed(0)
        model = Model()
        recipe = "mxfp8" if rank == 1 and change else "fp8_current"

        def step():
            with quire.autocast(recipe=recipe):
                return torch.compile(model)(torch.randn(4 + rank, HIDDEN))

        return message(step)
    finally:
        del os.environ["QUIRE_CHECK_RANKS"]
        torch.compiler.set_stance("default")


# ---------------------------------------------------------------- codes


class SentBytes(TorchDispatchMode):
    """What this process gives to exchanges of rows."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if "all_to_all_single" in function.name():
            self.sizes.append(arguments[0].nbytes)
        return function(*arguments, **(options or {}))


def codes_are_sent(rank, recipe, dtype):
    """Sizes of the exchange of rows, of values and of codes, in a call without gradients whose result is the same."""
    found = []
    for dispatch in ("values", "codes"):
        case = Case(recipe, ep={"ep_dispatch": dispatch}, dtype=dtype)
        whole, part = case.mixtures()
        x = data(case)[0][0]
        with torch.no_grad(), under(recipe), SentBytes() as sent:
            y = part(own_tokens(case, x))
        with torch.no_grad(), under(recipe):
            assert torch.equal(y, own_tokens(case, whole(x)))
        found.append(sent.sizes[1])
    return found


def frozen_experts(rank, recipe):
    """The gradient of x, where experts are not trained."""
    case = Case(recipe, ep={"ep_dispatch": "codes"})
    whole, part = case.mixtures()
    x, dy = data(case)[0]
    for layer in (whole, part):
        layer.requires_grad_(False)
    results = []
    for layer, of in ((whole, x), (part, own_tokens(case, x))):
        of = of.clone().requires_grad_()
        with under(recipe):
            y = layer(of)
        y.backward(dy if layer is whole else own_tokens(case, dy))
        results.append(of.grad)
    assert torch.equal(own_tokens(case, results[0]), results[1])
