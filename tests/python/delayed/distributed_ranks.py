"""What two processes do that train with delayed scaling together."""

import contextlib
import functools
import gc

import torch
import torch.distributed as dist

import quire
from python.delayed.delayed_reference import Layer, stored, used_scales, varied
from quire.recipe import DelayedScaling

WORLD = 2
OPTIONS = {"amax_history_len": 4}


def data(rank, step):
    """What a rank feeds; nothing but zeros in some steps, so that it has to take the other's amax."""
    factor = 0.0 if (rank + step) % 4 == 0 else 10.0**rank
    return varied(step, 8, 16, seed=rank) * factor, varied(step, 8, 32, seed=10 + rank) * factor


def make_layer():
    torch.manual_seed(0)
    return quire.Linear(16, 32)


def compare_scales(rank, recipe, collected_by, *, group=None, wrap=None, inside=False):
    """Trains, and compares every scale with a model that sees the data of the ranks in collected_by. inside: autocast
    is in a compiled function."""
    layer, model = make_layer(), Layer()
    function = layer if wrap is None else wrap(layer)
    around = functools.partial(quire.autocast, recipe=recipe, amax_reduction_group=group)
    if inside:
        function, around = compiled(around()(layer)), contextlib.nullcontext
    for step in range(8):
        x, dy = data(rank, step)
        with quire.debug.operands() as records:
            with around():
                y = function(x.requires_grad_())
            y.backward(dy)
        model.step()
        assert used_scales(records, "x") == [stored(model.fwd.scale[0])], (rank, step)
        assert used_scales(records, "dy") == [stored(model.bwd.scale[0])], (rank, step)
        for other in collected_by:
            x, dy = data(other, step)
            model.forward(x, layer.weight)
            model.backward(dy)
    with quire.autocast(recipe=recipe, amax_reduction_group=group):
        model.step()
    model.check(layer.delayed)


def divided(amax, scale, largest, recipe):
    """As numpy divides, rounded once."""
    return torch.where(amax > 0, torch.full_like(amax, largest) / amax, scale)


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def leave_in_a_cycle(rank, recipe):
    """A layer that ran, which garbage collection has ended on one rank and not yet on the other."""
    cycle = [make_layer()]
    cycle.append(cycle)
    run(cycle[0], recipe)
    del cycle
    if rank == 1:
        gc.collect()


def run(layer, recipe):
    with quire.autocast(recipe=recipe):
        layer(torch.ones(8, 16)).sum().backward()


def garbage(rank, recipe):
    gc.disable()
    leave_in_a_cycle(rank, recipe)
    compare_scales(rank, recipe, collected_by=range(WORLD))  # a layer made after it
    layer = make_layer()
    leave_in_a_cycle(rank, recipe)
    for _ in range(3):  # a layer made before it
        run(layer, recipe)
    amaxes = torch.stack([torch.tensor(1.0), layer.weight.detach().abs().max()])
    assert torch.equal(layer.delayed.fwd_history[2:4, :2], amaxes.expand(2, 2))
    gc.enable()


def uses_the_scales_of_the_largest_amax(rank):
    compare_scales(rank, DelayedScaling(**OPTIONS), collected_by=range(WORLD))
    compare_scales(rank, DelayedScaling(**OPTIONS, reduce_amax=False), collected_by=[rank])
    alone = [dist.new_group([other]) for other in range(WORLD)][rank]
    compare_scales(rank, DelayedScaling(**OPTIONS), collected_by=[rank], group=alone)

    def parallel(layer):
        wrapped = torch.nn.parallel.DistributedDataParallel(layer, broadcast_buffers=True)
        assert not any("delayed" in name for name, _ in wrapped.named_buffers())
        return wrapped

    compare_scales(rank, DelayedScaling(**OPTIONS, reduce_amax=False), collected_by=[rank], wrap=parallel)
    compare_scales(rank, DelayedScaling(**OPTIONS), collected_by=range(WORLD), wrap=parallel)
    compare_scales(rank, DelayedScaling(**OPTIONS), collected_by=range(WORLD), wrap=compiled)
    compare_scales(rank, DelayedScaling(**OPTIONS), collected_by=range(WORLD), inside=True)
    compare_scales(rank, DelayedScaling(**OPTIONS), collected_by=[rank], group=alone, inside=True)
    compare_scales(rank, DelayedScaling(**OPTIONS, reduce_amax=False), collected_by=[rank], inside=True)
    compare_scales(
        rank, DelayedScaling(**OPTIONS, scaling_factor_compute_algo=divided), collected_by=range(WORLD), inside=True
    )
    garbage(rank, DelayedScaling(**OPTIONS))
