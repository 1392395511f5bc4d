"""Layers and models that PyTorch's parallelize_module has divided, for functions that tests/ranks.py runs."""

import copy
import functools

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from every_recipe import TABLE
from parallel_layers import WAYS, compare, data, part_of, passes
from quire.distributed import ColumnParallel, RowParallel

#: Column and row styles.
STYLES = {"own": (ColumnParallel, RowParallel), "torch": (ColwiseParallel, RowwiseParallel)}


@functools.cache
def mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def style(kind, mode, sequence, **options):
    layout = {"input_layouts" if mode == "column" else "output_layouts": Shard(0)} if sequence else {}
    return STYLES[kind][mode == "row"](**layout, **options)


def layer_equals_one_process(rank, kind, case):
    whole = case.make(None)
    part = parallelize_module(copy.deepcopy(whole), mesh(), style(kind, case.mode, case.sequence))
    assert all(isinstance(parameter, DTensor) for parameter in part.parameters())
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter.to_local(), part_of(case, name, whole.get_parameter(name))), name
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name
    xs, dys = data(case)
    recipe = TABLE[case.recipe]
    expected = passes(whole, xs, dys, recipe, **case.call)
    own = ([part_of(case, "x", x) for x in xs], [part_of(case, "dy", dy) for dy in dys])
    compare(case, passes(part, *own, recipe, WAYS[case.way](part), **case.call), expected)
    for name, parameter in part.named_parameters():
        grad = getattr(parameter, "main_grad", parameter.grad)
        assert type(grad) is DTensor and grad.placements == parameter.placements, (name, grad.placements)
