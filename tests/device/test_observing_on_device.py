"""What is observed of kernels that run later, on a device: the CPU's numbers, and nothing is disturbed."""

import pytest
import torch

import quire
from device import device as testdevice
from device.twins import Inputs, assert_same, device_of, reference, stream_of, twin_step, twins
from every_recipe import ALL

#: Modules without groups, whose kernels tell a device's observer of one tensor each.
SINGLE = ["Linear", "LayerNormLinear", "LayerNormMLP"]
PLACES = ["default", "side", "other"]


def counted(module, inputs, recipe):
    """A step, and what was counted in it."""
    with quire.debug.statistics() as counts:
        results = twin_step(module, inputs, recipe)
    return results, counts


@pytest.mark.parametrize(
    ("name", "recipe", "place"),
    [
        pytest.param(name, recipe, place := PLACES[(i + j) % len(PLACES)], id=f"{name}-{text}-{place}")
        for i, name in enumerate(SINGLE)
        for j, (text, recipe) in enumerate(ALL.items())
    ],
)
def test_statistics_of_a_device_are_those_of_the_cpu_and_change_no_bit(name, recipe, place):
    cpu, there = twins(name, device_of(place))
    ours, theirs = Inputs(name, device_of(place)), Inputs(name)
    for inputs in (ours, theirs):
        inputs.x[3, 5] = torch.inf
        inputs.x[4, 6] = 1e30
        inputs.x[5, :9] = 1e-30
    with stream_of(place):
        got, counts = counted(there, ours, recipe)
    expected = reference(cpu, theirs, recipe)
    _, on_cpu = counted(twins(name, "cpu")[0], theirs, recipe)
    assert_same(got, expected)
    assert len(counts) > 0 and counts == on_cpu


def test_a_captured_step_is_not_counted_and_stays_whole():
    _, there = twins("LayerNormLinear", testdevice.NAME)
    inputs = Inputs("LayerNormLinear", testdevice.NAME)
    expected = twin_step(there, inputs, ALL["mxfp8"])
    with quire.debug.statistics() as counts, testdevice.Graph() as graph:
        got = twin_step(there, inputs, ALL["mxfp8"])
    graph.replay()
    assert counts == []
    assert_same(got, expected)


@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_operands_of_a_device_are_those_of_the_cpu(recipe):
    cpu, there = twins("LayerNormLinear", testdevice.NAME)
    pairs = []
    for module, device in ((cpu, "cpu"), (there, testdevice.NAME)):
        with quire.debug.operands() as records:
            twin_step(module, Inputs("LayerNormLinear", device), recipe)
        pairs.append(records)
    assert [one.role for one in pairs[0]] == [one.role for one in pairs[1]] != []
    for a, b in zip(*pairs, strict=True):
        assert a.tensor.spec == b.tensor.spec and b.tensor.device.type == testdevice.NAME
        assert_same(list(b.tensor.buffers().values()), list(a.tensor.buffers().values()))
