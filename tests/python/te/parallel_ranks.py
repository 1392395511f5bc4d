"""Layers sharded over processes by TransformerEngine's arguments, and in parts by name, for functions that
tests/ranks.py runs."""

import contextlib
import copy
import os
import types
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

import quire
from every_recipe import TABLE
from python.distributed.failing_ranks import SHORT, TOKENS, message
from python.distributed.parallel_layers import IN, OUT, PARTS, Case, data, part_of, passes
from quire import te
from quire.distributed import Parallel


@dataclass(frozen=True)
class TeCase(Case):
    """Of layers of quire.te: a Linear, one of parts by name, or a LayerNormMLP."""

    def layer(self, **options):
        if "MLP" in self.kind:
            return te.LayerNormMLP(IN, OUT, activation="swiglu", **options)
        return te.Linear(IN, OUT, **({"parameters_split": PARTS} if "parts" in self.kind else {}), **options)


SHARDED = [(mode, sequence) for mode in ("column", "row") for sequence in (False, True)]
#: Of TeCase.
PARTS_BY_NAME = "Linear of parts by name"


def group_of_one(rank):
    """A group of this process alone: layers are those without a group, to the bit."""
    group = [distributed.new_group([each]) for each in range(2)][rank]
    for recipe in ("high_precision", "fp8_current", "mxfp8", "nvfp4", "delayed"):
        for mode, sequence in SHARDED:
            case = TeCase(recipe, "Linear", mode, sequence)
            expected = passes(case.make(None), *data(case), TABLE[recipe])
            layer = case.make_with(parallel_mode=mode, tp_group=group, sequence_parallel=sequence)
            for one, other in zip(passes(layer, *data(case), TABLE[recipe]), expected, strict=True):
                assert all(torch.equal(one[name], value) for name, value in other.items()), case


def only_one_makes_a_layer(rank):
    """Process 0 makes a sharded layer while process 1 does not come."""
    if rank == 0:
        te.LayerNormMLP(IN, OUT, set_parallel_mode=True, tp_group=distributed.group.WORLD, sequence_parallel=True)
    return True


def drawn_by_a_tracker(rank):
    """A layer that each rank draws from a framework's stream is called where ranks are checked."""
    os.environ["QUIRE_CHECK_RANKS"] = "1"
    try:
        torch.manual_seed(rank)
        group = distributed.new_group(timeout=timedelta(seconds=SHORT))
        fork = types.SimpleNamespace(fork=lambda name: torch.random.fork_rng())
        layer = te.Linear(64, 64, tp_group=group, parallel_mode="row", get_rng_state_tracker=lambda: fork)
        return message(lambda: layer(torch.ones(TOKENS, 32)))
    finally:
        del os.environ["QUIRE_CHECK_RANKS"]
        torch.compiler.set_stance("default")


class Tracker:
    """A framework's, which has another state in each process."""

    def __init__(self, rank):
        self.rank = rank

    @contextlib.contextmanager
    def fork(self, name):
        kept = torch.get_rng_state()
        torch.manual_seed(7 + self.rank)
        yield
        torch.set_rng_state(kept)


def group_that_comes_later(rank):
    """A layer that is made with tp_size alone is, once it has a group, one that was made with it."""
    world, found = distributed.group.WORLD, {}
    for (mode, sequence), kind in [*((way, "Linear") for way in SHARDED), (("column", True), "LayerNormMLP swiglu")]:
        case = TeCase("nvfp4", kind, mode, sequence)
        modes = {"set_parallel_mode": True} if "MLP" in kind else {"parallel_mode": mode}
        options = {"tp_size": 2, "sequence_parallel": sequence, "get_rng_state_tracker": lambda: Tracker(rank), **modes}
        layer, expected = case.make_with(**options), case.make(Parallel(mode, world, sequence))
        drawn = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
        layer = copy.deepcopy(layer).bfloat16().float()
        for act in (lambda one=layer: one(torch.ones(2, 2)), lambda one=layer: quire.TrainingState(one).state_dict()):
            try:
                act()
            except RuntimeError as error:
                assert "made for 2 ranks without their group; call set_tensor_parallel_group" in str(error)
            else:
                raise AssertionError("a layer without its group does something")
        layer.set_tensor_parallel_group(world)
        layer.set_tensor_parallel_group(world)
        assert all(layer.of(name, "parallel") == expected.of(name, "parallel") for name in layer.products)
        state = quire.rng_state(layer)
        layer.load_state_dict(expected.state_dict())
        quire.set_rng_state(layer, quire.rng_state(expected))
        xs, dys = data(case)
        own = ([part_of(case, "x", x) for x in xs], [part_of(case, "dy", dy) for dy in dys])
        for one, other in zip(*(passes(each, *own, TABLE["nvfp4"]) for each in (layer, expected)), strict=True):
            assert all(torch.equal(one[name], value) for name, value in other.items()), case
        found[str(case)] = ({name: t.tolist() for name, t in drawn.items()}, {k: v.tolist() for k, v in state.items()})
    return found
