"""Delayed scaling in compiled functions: bit for bit what eager does, in one graph, autocast outside or inside."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import quire
from delayed_reference import RECIPE, varied
from quire.recipe import DelayedScaling

STATE = ("fwd_scale", "bwd_scale", "fwd_amax", "bwd_amax", "fwd_history", "bwd_history")


@pytest.fixture
def make_model():
    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(quire.Linear(16, 32), torch.nn.ReLU(), quire.Linear(32, 16))

    return make


def save_the_second_product(context, op, *args, **kwargs):
    wide = op is torch.ops.quire.linear_fwd.default and args[3] == 32
    return CheckpointPolicy.MUST_SAVE if wide else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_the_second_product)
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


BODIES = {
    "plain": lambda model, x: model(x),
    "twice": lambda model, x: model(model(x)),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "selective": selective,
}


def snapshot(model):
    kept = [p.grad for p in model.parameters()]
    for layer in model:
        if isinstance(layer, quire.Linear):
            kept += [getattr(layer.delayed, name) for name in STATE]
    return [tensor.clone() for tensor in kept if tensor is not None]


def train(model, function, tokens=(8, 8, 8, 8, 8), around=quire.autocast, optimizer=True):
    """Steps of `function` with backward inside `around`; results, gradients and states after every one of them."""
    out = []
    for step, m in enumerate(tokens):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0 if step % 2 else 0.4)
        x = varied(step, m, 16, low=-3, high=3).requires_grad_()
        with around():
            y = function(x)
            y.backward(varied(step, *y.shape, seed=1))
        out += [y.detach().clone(), x.grad.clone(), *snapshot(model)]
    return out


def delayed():
    return quire.autocast(recipe=RECIPE)


def nothing():
    return quire.autocast(enabled=False)


def equal(a, b, same):
    return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_training_is_that_of_eager(make_model, compiler, equal_bits, place, body, backend):
    eager = make_model()
    expected = train(eager, lambda x: body(eager, x), around=delayed)
    model = make_model()

    def inside(x):
        with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
            return body(model, x)

    function = inside if place == "inside" else lambda x: body(model, x)
    found = train(model, compiler(function, backend=backend), around=delayed if place == "outside" else nothing)
    assert equal(found, expected, equal_bits)
    assert compiler.graphs == 1
