"""Activation checkpointing of operations, and te.checkpoint."""

import functools

import pytest
import torch

import quire
from quire import te

pytestmark = pytest.mark.any_device


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_operation_that_quantizes_is_not_recomputed_under_another_recipe(reentrant):
    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with quire.autocast(recipe="mxfp8"):
        y = again(lambda x: te.ops.Quantize()(x).dequantize().square(), x)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="that ran under 'x=mxfp8:nan"):
        y.sum().backward()
    assert x.grad is None and quire.active_recipe() is None


@pytest.mark.cpu_only
def test_options_of_parallelism_are_refused():
    with pytest.raises(NotImplementedError, match="quire.checkpoint: tp_group is not available"):
        te.checkpoint(quire.Linear(64, 64), torch.randn(3, 64), tp_group=object())
