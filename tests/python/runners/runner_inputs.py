"""Sizes and inputs of runners under test, and the check that a test leaves none of them registered."""

import gc

import pytest
import torch

from quire import runners

E, H, N = 4, 48, 32
INNER = 16


def rand(*sizes, seed=0, dtype=torch.bfloat16):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_bits(x, w, bias=None, x_spec="nvfp4", w_spec="nvfp4"):
    return torch.ops.quire.linear(x, w, bias, f"x={x_spec},w={w_spec},dy={x_spec}", torch.bfloat16)


def choices(tokens=7, top_k=2):
    ids = (torch.arange(tokens * top_k, dtype=torch.int32) % (E + 1) - 1).reshape(tokens, top_k)
    return torch.linspace(0.1, 0.9, tokens * top_k).reshape(tokens, top_k), ids


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    before = {runner.handle for runner in runners.registered()}

    def left() -> list:
        return [runner for runner in runners.registered() if runner.handle not in before]

    yield
    if left():  # what only cycles hold; a collection looks at all that a test session has, and takes seconds
        gc.collect()
    assert left() == []
