"""What tests of several examples share."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

CHAT = Path(__file__).resolve().parents[2] / "examples" / "chat"


@pytest.fixture(scope="module")
def chat():
    """The modules of examples/chat."""
    sys.path.insert(0, str(CHAT))
    try:
        names = ("llama", "checkpoint", "perplexity", "compare", "export", "dialects")
        yield dict(zip(names, (importlib.import_module(name) for name in names), strict=True))
    finally:
        sys.path.remove(str(CHAT))


@pytest.fixture(scope="module")
def make_tiny(chat):
    """A function that makes a model of that class, with random weights."""

    def make():
        torch.manual_seed(0)
        sizes = chat["llama"].Sizes(97, 64, 128, 2, 4, 2, 1e-5, 10000.0, 256)
        return chat["llama"].Llama(sizes).eval().requires_grad_(False)

    return make


@pytest.fixture
def tiny(make_tiny):
    return make_tiny()
