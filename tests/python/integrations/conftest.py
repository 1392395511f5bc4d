"""Tests of other packages' models, each with nothing compiled: they compile the same functions of these packages."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
