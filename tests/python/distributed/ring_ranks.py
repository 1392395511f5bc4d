"""Divided layers that exchange tokens in pieces (Parallel.overlap), compared with the same layers that do not, for
functions that tests/ranks.py runs."""

import dataclasses

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import quire
from python.distributed.parallel_layers import OUT, RECIPES, WAYS, data, part_of, passes
from python.distributed.sums import assert_same_sums
from quire.distributed import ColumnParallel, Parallel, RowParallel


def results(case, overlap, reduce=""):
    """Of this process, of each step."""
    parallel = Parallel(case.mode, distributed.group.WORLD, True, reduce=reduce, overlap=overlap)
    layer = case.make(parallel)
    xs, dys = data(case)
    own = ([part_of(case, "x", x) for x in xs], [part_of(case, "dy", dy) for dy in dys])
    return passes(layer, *own, RECIPES[case.recipe], WAYS[case.way](layer), **case.call)


def equals_the_plain_way(rank, case, reduce=""):
    """Where case.sums() says that PyTorch multiplies or the backend adds, up to rounding."""
    found, expected = results(case, "ring", reduce), results(case, None, reduce)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name, value in one.items():
            where = f"{case}, {reduce!r}, step {step}: {name}"
            assert value.dtype == other[name].dtype and value.shape == other[name].shape, where
            if RECIPES[case.recipe] is None:  # PyTorch's matmul, whose bits depend on the number of rows
                assert_same_sums(value, other[name], OUT, where)
            else:
                assert torch.equal(value, other[name]), f"{where}: {(value - other[name]).abs().max()}"


def without_gradients(rank, case):
    """y of no_grad and inference_mode, which is that of a pass with gradients, and of torch.autocast."""
    case = dataclasses.replace(case, dtype=torch.float32)
    x = part_of(case, "x", data(case)[0][0])
    layers = [
        case.make(Parallel(case.mode, distributed.group.WORLD, True, overlap=overlap)) for overlap in (None, "ring")
    ]
    with quire.autocast(recipe=RECIPES[case.recipe]):
        expected = layers[0](x).detach()
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode, quire.autocast(recipe=RECIPES[case.recipe]):
            plain, ring = (layer(x) for layer in layers)
        assert torch.equal(plain, ring) and plain.dtype == ring.dtype
        assert plain.dtype == torch.bfloat16 or torch.equal(plain, expected)


def a_style_equals_the_plain_way(rank, case):
    style, layouts = (ColumnParallel, "input_layouts") if case.mode == "column" else (RowParallel, "output_layouts")
    xs, dys = data(case)
    own = ([part_of(case, "x", x) for x in xs], [part_of(case, "dy", dy) for dy in dys])
    found = []
    for overlap in (None, "ring"):
        layer = parallelize_module(
            case.make(None), init_device_mesh("cpu", (2,)), style(**{layouts: Shard(0)}, overlap=overlap)
        )
        assert ("overlap=ring" in layer.parallel.text) == (overlap == "ring")
        found.append(passes(layer, *own, RECIPES[case.recipe], WAYS[case.way](layer)))
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
