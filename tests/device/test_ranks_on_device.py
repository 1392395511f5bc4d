"""A rank whose tensors are on the device, with PyTorch's fake group, whose collectives move nothing: it waits for
nothing, and its steps are captured with their collectives. With a group that moves: tests/python."""

import pytest
import torch

import pytorch
import quire
import ranks
from device import device as testdevice
from device.twins import assert_same
from python.distributed.captured_ranks import STEPS, Step
from quire.distributed import Parallel


def step_of(name, place, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "place", place)
        return Step(name)


@pytorch.fake_group
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_rank_waits_for_nothing_and_is_replayed(name, rank, monkeypatch):
    with ranks.rank_of(rank, 2, testdevice.NAME):
        there, cpu = (step_of(name, place, monkeypatch) for place in (testdevice.NAME, "cpu"))
        there.set(0)
        cpu.set(0)
        there.run()  # the first call makes what lasts
        cpu.run()
        torch.accelerator.synchronize()
        testdevice.counts()
        got = there.run()
        assert testdevice.waits() == {}
        assert_same(got, cpu.run())
        with testdevice.Graph() as graph:
            got = there.run()
        for number in (1, 2, 3):
            there.set(number)
            cpu.set(number)
            graph.replay()
            assert_same(got, cpu.run())


@pytest.mark.parametrize(
    "make",
    [
        lambda group: quire.Linear(64, 32, parallel=Parallel("column", group)),
        lambda group: quire.MoE(64, 96, 4, 2, ep_group=group),
        lambda group: quire.MoE(64, 96, 4, 2, tp_group=group),
    ],
    ids=["Linear", "experts", "parts of experts"],
)
def test_a_group_without_the_cpu_has_layers_that_are_made_there(make):
    with ranks.rank_of(0, 2, backend=f"{testdevice.NAME}:fake") as group:
        torch.manual_seed(0)
        layer = make(group)
        assert {p.device.type for p in layer.parameters()} == {"cpu"}
        states = quire.rng_state(layer)
        quire.TrainingState(layer).state_dict()
        there = quire.rng_state(layer.to(testdevice.NAME))
        assert states.keys() == there.keys() and all(torch.equal(states[k], there[k].cpu()) for k in states)
