"""Tensors of one call on two devices: each operator of quire refuses every one that is not where the others are, before
it has launched anything, and the device works on."""

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from device import device as testdevice
from device.twins import assert_same, device_of
from fuzz import calls

ops = torch.ops.quire
#: Operators that take one tensor, or of which no call is right twice: names of runners are taken.
NOT_ASKED = ("runner_register", "nvfp4_")
#: Arguments that the host has, whichever device computes.
OF_HOST = ("stash",)


@pytest.fixture(scope="module")
def recorded():
    """Operator -> calls that are right, of tensors on the CPU."""
    return calls.recorded(0)


def names_of(call, flat):
    """Of each leaf, the argument that it belongs to."""
    names = []
    for argument, value in zip(call.operator._schema.arguments, call.arguments, strict=True):
        names += [argument.name] * len(tree_flatten(value)[0])
    assert len(names) == len(flat)
    return names


def refused(call, place, other):
    """Calls it once for each tensor, with that one elsewhere; returns how often it was refused."""
    flat, tree = tree_flatten(call.arguments)
    names = names_of(call, flat)
    own = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.numel() and names[i] not in OF_HOST]
    for moved in own if len(own) > 1 else ():
        there = {i: t.to(other if i == moved else place) for i, t in enumerate(flat) if i in own}
        arguments = tree_unflatten([there.get(i, value) for i, value in enumerate(flat)], tree)
        testdevice.counts()
        with testdevice.Launches() as launches, pytest.raises(RuntimeError) as error:
            call.operator(*arguments)
        text = str(error.value).splitlines()[0]
        assert "must be on one device; got " in text and "move one with .to()" in text, (call.operator, names[moved])
        assert launches.names == [] and testdevice.waits() == {}, (call.operator, names[moved], launches.names)
    return len(own) if len(own) > 1 else 0


@pytest.mark.parametrize("other", ["cpu", "quiretest:1"])
def test_every_operator_refuses_a_tensor_that_is_elsewhere(other, recorded):
    place, asked = device_of("default"), set()
    for operator in calls.operators():
        name = operator.name().removeprefix("quire::")
        for call in recorded.get(str(operator), ())[:2]:
            if not name.startswith(NOT_ASKED) and refused(call, place, torch.device(other)):
                asked.add(name)
    assert testdevice.violations() == []
    assert {"linear", "linear_fwd", "linear_bwd", "grouped_linear", "wgrad_", "grouped_wgrad_", "accumulate_"} <= asked
    assert {"dequantize", "reorder", "norm_bwd", "route_bwd", "unpermute_dot", "delayed_update_"} <= asked
    assert len(asked) >= 25, sorted(asked)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    assert_same(ops.quantize(x.to(place), "nvfp4", True, True), ops.quantize(x, "nvfp4", True, True))
