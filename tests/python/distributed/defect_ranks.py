"""Functions of test_named_defects.py that tests/ranks.py runs in two processes."""

import copy
import gc
import time

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from every_recipe import TABLE
from python.distributed.parallel_layers import IN, OUT, Case, compare, data, part_of, passes
from python.distributed.style_ranks import converted, mesh, model, model_data, plan, style
from python.distributed.sums import assert_same_sums
from quire.distributed import Parallel

SHARDED = [(mode, sequence) for mode in ("column", "row") for sequence in (False, True)]


class Operators(TorchDispatchMode):
    """The names of operators that are called, and the bytes of what all-gathers are given."""

    def __init__(self):
        super().__init__()
        self.names, self.gathered = [], 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = str(operator)
        self.names.append(name)
        if "all_gather" in name:
            given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.gathered += sum(t.numel() * t.element_size() for t in given)
        return operator(*args, **(kwargs or {}))


# ---------------------------------------------------------------- sharded layers


def part_of_zeros(rank, recipe):
    """One process has zeros only, of w, x and dy. The layer is that of one process, whose amaxes are not 0."""
    for (mode, sequence), styled in [(way, styled) for way in SHARDED for styled in (False, True)]:
        case = Case(recipe, "Linear", mode, sequence)
        whole = case.make(None)
        with torch.no_grad():
            whole.weight.chunk(2, 0 if mode == "column" else 1)[1].zero_()
        if styled:
            part = parallelize_module(copy.deepcopy(whole), mesh(), style("own", mode, sequence))
        else:
            part = case.make(Parallel(mode, distributed.group.WORLD, sequence))
            part.weight.data.copy_(part_of(case, "weight", whole.weight))
        xs, dys = data(case)
        for x, dy in zip(xs, dys, strict=True):
            x.chunk(2, 0 if mode == "column" else 1)[1].zero_()
            dy.chunk(2, 1 if mode == "column" else 0)[1].zero_()
        expected = passes(whole, xs, dys, TABLE[recipe])
        own = ([part_of(case, "x", x) for x in xs], [part_of(case, "dy", dy) for dy in dys])
        compare(case, passes(part, *own, TABLE[recipe]), expected)


def group_of_one(rank):
    """Groups of this process alone: layers are those without a group, to the bit."""
    group = [distributed.new_group([each]) for each in range(2)][rank]
    alone = DeviceMesh.from_group(group, "cpu")
    for recipe in ("high_precision", "fp8_current", "mxfp8", "nvfp4", "delayed"):
        for mode, sequence in SHARDED:
            case = Case(recipe, "Linear", mode, sequence)
            expected = passes(case.make(None), *data(case), TABLE[recipe])
            sharded = [
                case.make(Parallel(mode, group, sequence)),
                parallelize_module(case.make(None), alone, style("own", mode, sequence)),
                parallelize_module(case.make(None), alone, style("torch", mode, sequence)),
            ]
            for layer in sharded:
                found = passes(layer, *data(case), TABLE[recipe])
                for one, other in zip(found, expected, strict=True):
                    for name, value in other.items():
                        got = one[name]
                        got = got.to_local() if hasattr(got, "to_local") else got
                        # PyTorch computes what has no recipe, in another order.
                        if recipe == "high_precision":
                            assert_same_sums(got, value, OUT, (case, name))
                        else:
                            assert torch.equal(got, value), (case, name)


def gradient_norm(rank):
    """clip_grad_norm_ of a sharded model, and of one process's."""
    whole = converted(model(quire.LayerNorm, blocks=1))
    x, dy = model_data()
    made = converted(model(quire.LayerNorm, blocks=1))
    parallelize_module(made, mesh(), plan("own", 1, 0, True))
    norms = []
    for each, own in ((whole, [x, dy]), (made, [t.chunk(2)[rank] for t in (x, dy)])):
        with quire.autocast(recipe="mxfp8"):
            each(own[0]).backward(own[1])
        norm = torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    return norms


def gathered_bytes(rank, recipe):
    """What a process sends of x in the forward pass, and of dy and x in the backward pass, against bfloat16."""
    found = []
    for mode in ("column", "row"):
        case = Case(recipe, "Linear", mode, True, tokens=(256,), dtype=torch.bfloat16)
        layer = case.make(Parallel(mode, distributed.group.WORLD, True))
        (x, *_), (dy, *_) = data(case)
        x, dy = part_of(case, "x", x).requires_grad_(), part_of(case, "dy", dy)
        with quire.autocast(recipe=TABLE[recipe]):
            with Operators() as forward:
                y = layer(x)
            with Operators() as backward:
                y.backward(dy)
        sharded = x if mode == "column" else dy
        whole = sharded.numel() * sharded.element_size()
        found.append((forward.gathered / whole, backward.gathered / whole))
    return found


def kept_codes_are_used(rank):
    """Quantizations of a forward pass without and with kept codes, and the error of stale ones."""
    found = []
    for mode, sequence in SHARDED:
        case = Case("fp8_current", "Linear", mode, sequence)
        layer = case.make(Parallel(mode, distributed.group.WORLD, sequence))
        (x, *_), _ = data(case)
        x = part_of(case, "x", x)
        counts = []
        with quire.autocast(recipe="fp8_current"):
            for _ in range(2):
                with Operators() as operators:
                    layer(x)
                counts.append(sum("quire.quantize" in name for name in operators.names))
                quire.quantize_weights(layer, "fp8_current")
            layer.weight.data.mul_(2)
            try:
                layer(x)
                said = "nothing"
            except RuntimeError as error:
                said = str(error)
        found.append((*counts, said))
    return found


def parts_that_end_within_a_block(rank, recipe):
    """Of a row layer: the sum of layers of one process, each of one part. Of a column layer: the layer of the part."""
    for mode, features in (("row", 2 * 48), ("column", 2 * 40)):
        torch.manual_seed(0)
        sizes = (features, 64) if mode == "row" else (64, features)
        layer = quire.Linear(*sizes, bias=False, parallel=Parallel(mode, distributed.group.WORLD))
        x = torch.randn(32, sizes[0])
        x = x.chunk(2, 1)[rank].contiguous() if mode == "row" else x
        own = quire.Linear(*reversed(layer.weight.shape), bias=False)
        own.weight.data.copy_(layer.weight)
        with torch.no_grad(), quire.autocast(recipe=recipe):
            y, expected = layer(x), own(x)
        if mode == "row":
            distributed.all_reduce(expected)
        assert torch.equal(y, expected), (recipe, mode)


def only_one_makes_a_layer(rank):
    """Process 0 makes sharded layers while process 1 does not come."""
    if rank == 0:
        for mode, sequence in SHARDED:
            quire.Linear(IN, OUT, parallel=Parallel(mode, distributed.group.WORLD, sequence))
        quire.LayerNormMLP(IN, OUT, parallel=Parallel("column", distributed.group.WORLD, True))
    return True


# ---------------------------------------------------------------- data parallelism


def uneven_shards(rank, out):
    """fully_shard of weights whose rows do not divide, some processes with none: training is that of replicas."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(quire.Linear(32, out), torch.nn.GELU(), quire.Linear(out, 32))
    copies = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(made))
    for layer in made:
        fully_shard(layer, mesh=mesh())
    fully_shard(made, mesh=mesh())
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    for each in (made, copies):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(2):
            with quire.autocast(recipe="mxfp8"):
                each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(made.parameters(), copies.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=0, atol=0)


def bytes_after_steps(rank, steps):
    """Bytes of the tensors that each step of a sharded model leaves alive, beside those that were there before."""
    gc.collect()
    before = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    others = {id(t) for t in before}
    made = torch.nn.Sequential(*[quire.Linear(64, 64) for _ in range(4)])
    for layer in made:
        fully_shard(layer, mesh=mesh())
    fully_shard(made, mesh=mesh())
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    found = []
    for _ in range(steps):
        with quire.autocast(recipe="mxfp8"):
            made(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(_least_alive(others))
    return found


def _least_alive(others):
    """Bytes of tensors whose ids are not among `others`. Gloo's threads let go of theirs a little later."""
    counts = []
    for _ in range(20):
        time.sleep(0.01)
        gc.collect()
        alive = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and id(t) not in others]
        alive = [t for t in alive if t.layout is torch.strided and not hasattr(t, "to_local")]
        counts.append(sum(t.untyped_storage().nbytes() for t in alive))
    return min(counts)


def main_grad_of_shards(rank):
    """What is said of a main_grad of a weight that fully_shard divides."""
    layer = quire.Linear(64, 64, fuse_wgrad_accumulation=True)
    fully_shard(layer, mesh=mesh())
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    try:
        with quire.autocast(recipe="mxfp8"):
            layer(torch.ones(4, 64)).sum().backward()
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    return said
