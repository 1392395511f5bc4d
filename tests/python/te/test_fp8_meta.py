"""fp8_meta of layers, against amaxes of the operands and the scales that follow from them."""

import copy
import operator
import pickle

import pytest
import torch

import quire
import quire.te as te
from quire.te.common.recipe import DelayedScaling, MXFP8BlockScaling

pytestmark = pytest.mark.any_device

FORWARD, BACKWARD = (te.FP8GlobalStateManager.get_meta_tensor_key(forward=way) for way in (True, False))
LENGTH = 3


def run(layer, steps, *arguments, recipe=None):
    """Inputs and gradients of results, of each step."""
    recipe = recipe or DelayedScaling(amax_history_len=LENGTH)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(16, 32, generator=generator) * 2.0**-step for _ in range(2))
        x.requires_grad_()
        with te.autocast(recipe=recipe):
            layer(x, *arguments).backward(dy)
        found.append((x.detach(), dy))
    return found


def amax(t):
    return float(t.abs().max())


@pytest.mark.parametrize("compiled", [False, True])
def test_scales_and_amaxes_of_a_layer(compiled, compiler):
    layer = te.Linear(32, 32)
    assert layer.fp8_meta == {} and (FORWARD, BACKWARD) == ("scaling_fwd", "scaling_bwd")
    (first, dy0), (second, dy1) = run(compiler(layer) if compiled else layer, 2)
    meta, w = layer.fp8_meta, amax(layer.weight.detach())
    expected = torch.zeros(LENGTH, 3)
    expected[0, :2], expected[-1, :2] = torch.tensor([amax(second), w]), torch.tensor([amax(first), w])
    assert torch.equal(meta[FORWARD].amax_history, expected)
    scale = torch.tensor([448 / amax(first), 448 / w, 1.0])
    assert torch.equal(meta[FORWARD].scale, scale)
    assert meta[BACKWARD].amax_history[:, 0].tolist() == [amax(dy1), 0, amax(dy0)]
    assert meta[BACKWARD].scale[0] == torch.tensor(57344 / amax(dy0))
    assert copy.deepcopy(layer).fp8_meta[FORWARD].scale.tolist() == meta[FORWARD].scale.tolist()


def test_it_is_a_copy_that_cannot_be_written_to():
    layer = te.Linear(32, 32)
    run(layer, 2)
    meta = layer.fp8_meta[FORWARD]
    before = quire.delayed_state(layer)
    for write in (
        lambda: meta.scale.fill_(2.0),
        lambda: meta.amax_history[0].zero_(),
        lambda: meta.scale.__setitem__(0, 2.0),
        lambda: operator.iadd(meta.scale, 1),
        lambda: torch.add(meta.scale, 1, out=meta.scale),
        lambda: meta.scale.detach().unbind()[0].fill_(2.0),
    ):
        with pytest.raises(RuntimeError, match=r"would write to fp8_meta.*quire\.set_delayed_state\(model, state\)"):
            write()
    # What is computed of a copy is a tensor as any other.
    scale = torch.ones(3).copy_(meta.scale)
    for other in (scale, meta.scale * 1, copy.deepcopy(meta.scale), pickle.loads(pickle.dumps(meta.scale))):
        assert type(other) is torch.Tensor and torch.equal(other, meta.scale)
        assert other.fill_(7.0).tolist() == [7.0] * 3  # it can be written to
    with pytest.raises(RuntimeError, match="must match the size"):
        meta.scale + torch.ones(7)
    with pytest.raises(AttributeError, match="cannot assign to field 'scale'"):
        meta.scale = torch.ones(3)
    with pytest.raises(AttributeError, match="has no setter|can't set"):
        layer.fp8_meta = {}
    after = quire.delayed_state(layer)
    assert all(torch.equal(after["delayed"][name], t) for name, t in before["delayed"].items() if name != "rule")


def test_slots_are_counted_by_matmul_and_by_group():
    grouped = te.GroupedLinear(2, 32, 32)
    ((x, dy),) = run(grouped, 1, [6, 10])
    each = [*zip(x.split([6, 10]), dy.split([6, 10]), (grouped.weight0, grouped.weight1), strict=True)]
    found = grouped.fp8_meta
    assert found[FORWARD].amax_history[0].tolist() == [
        value for x, _, w in each for value in (amax(x), amax(w.detach()), 0)
    ]
    assert found[BACKWARD].amax_history[0].tolist() == [value for _, dy, _ in each for value in (amax(dy), 0)]
    mlp = te.LayerNormMLP(32, 48)
    run(mlp, 1)
    row = mlp.fp8_meta[FORWARD].amax_history[0]
    assert len(row) == 6 and len(mlp.fp8_meta[BACKWARD].scale) == 4
    for place, weight in ((1, mlp.fc1_weight), (4, mlp.fc2_weight)):
        assert float(row[place]) == amax(weight.detach())


def test_layers_without_delayed_scaling_have_none():
    layer = te.LayerNormLinear(32, 32)
    run(layer, 1, recipe=MXFP8BlockScaling())
    assert layer.fp8_meta == {}
    assert te.Linear(8, 8, device="meta").fp8_meta == {} and not hasattr(torch.nn.Linear(8, 8), "fp8_meta")
