"""Delayed scaling: a small model, steps of training with scales about to change much, and what they leave behind."""

import torch

import quire
from python.delayed.delayed_reference import RECIPE, varied

STATE = ("fwd_scale", "bwd_scale", "fwd_amax", "bwd_amax", "fwd_history", "bwd_history")


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(quire.Linear(16, 32), torch.nn.ReLU(), quire.Linear(32, 16))


def snapshot(model):
    kept = [p.grad for p in model.parameters()]
    for layer in model:
        if isinstance(layer, quire.Linear):
            kept += [getattr(layer.delayed, name) for name in STATE]
    return [tensor.clone() for tensor in kept if tensor is not None]


def train_with_changes(model, function, tokens=(8, 8, 8, 8, 8), around=quire.autocast, optimizer=True):
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
