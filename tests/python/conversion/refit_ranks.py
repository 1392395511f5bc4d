"""quire.refit with weights of several ranks, for functions that tests/ranks.py runs."""

import copy

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quire
from quire.distributed import Parallel

IN = 256


def trainer(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(IN, 300), torch.nn.GELU(), torch.nn.Linear(300, IN, bias=False))


def served(model, recipe="mxfp8"):
    return quire.convert(copy.deepcopy(model), recipe, for_inference=True, tokens=None)


def assert_same(one, other):
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        quantized = isinstance(p, quire.QuantizedTensor)
        of_p, of_q = (t.buffers() if quantized else {"": t} for t in (p, q))
        assert all(torch.equal(of_p[key], of_q[key]) for key in of_p), name


def sharded(seed):
    return fully_shard(trainer(seed), mesh=init_device_mesh("cpu", (2,)))


def shards_of_a_trainer_become_whole_weights(rank):
    model = served(trainer(1))
    state = sharded(2).state_dict()
    assert isinstance(state["0.weight"], DTensor)
    quire.refit(model, state)
    assert_same(model, served(trainer(2)))


def a_refusal_of_one_rank_is_that_of_all(rank):
    model = served(trainer(1))
    state = sharded(2).state_dict()
    if rank == 1:
        state["2.weight"].to_local().fill_(torch.nan)
    said = "has values that are NaN" if rank == 1 else "another rank refuses its weights"
    with pytest.raises(ValueError, match=said):
        quire.refit(model, state)
    assert_same(model, served(trainer(1)))


def mixture(seed, group=None, **options):
    torch.manual_seed(seed)
    return torch.nn.Sequential(quire.GroupedLinear(4, 64, 48, ep_group=group, **options))


def a_rank_takes_its_own_experts(rank):
    group = distributed.group.WORLD
    for single in (False, True):
        options = {"single_grouped_weight": single, "single_grouped_bias": single}
        whole, own = mixture(2, **options), mixture(2, group, **options)
        other_form = mixture(2, single_grouped_weight=not single, single_grouped_bias=not single)
        for state in (whole.state_dict(), own.state_dict(), other_form.state_dict()):
            model = served(mixture(1, group, **options))
            quire.refit(model, state)
            assert_same(model, served(own))


def a_layer_that_is_sharded_takes_its_part(rank):
    """It stays in high precision, beside layers that have codes."""

    def made(seed, parallel):
        torch.manual_seed(seed)
        return torch.nn.Sequential(quire.Linear(64, 96, parallel=parallel), quire.Linear(96, 64))

    parallel = Parallel("column", distributed.group.WORLD)
    with torch.no_grad():
        for whole in (False, True):
            model = served(made(1, parallel))
            state = made(2, None if whole else parallel).state_dict()
            quire.refit(model, state)
            assert_same(model, served(made(2, parallel)))
