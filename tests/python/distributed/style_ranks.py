"""Layers and models that PyTorch's parallelize_module has sharded, for functions that tests/ranks.py runs."""

import copy
import functools
import itertools

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import quire
from every_recipe import TABLE
from python.distributed.parallel_layers import RECIPES, WAYS, compare, data, part_of, passes
from python.distributed.sums import assert_same_sums
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
    recipe = RECIPES[case.recipe]
    expected = passes(whole, xs, dys, recipe, **case.call)
    own = ([part_of(case, "x", x) for x in xs], [part_of(case, "dy", dy) for dy in dys])
    compare(case, passes(part, *own, recipe, WAYS[case.way](part), **case.call), expected)
    for name, parameter in part.named_parameters():
        grad = getattr(parameter, "main_grad", parameter.grad)
        assert type(grad) is DTensor and grad.placements == parameter.placements, (name, grad.placements)


# ---------------------------------------------------------------- models

HIDDEN, INNER, TOKENS = 256, 512, (32, 4)


class Block(torch.nn.Module):
    """What a model of PyTorch has, before quire.convert. norm: its class."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm(HIDDEN)
        self.up, self.down = torch.nn.Linear(HIDDEN, INNER), torch.nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def model(norm=torch.nn.LayerNorm, blocks=2):
    torch.manual_seed(0)
    made = torch.nn.Sequential(*[Block(norm) for _ in range(blocks)])
    with torch.no_grad():
        for block in made:
            block.norm.weight.uniform_(0.5, 1.5)
    return made


def plan(kind, blocks, dim, local):
    """Tokens are sharded along dim outside of matmuls, and x and y of the model too; None: only features are."""
    column, row = STYLES[kind]
    sharded = {} if dim is None else {"norm": SequenceParallel(sequence_dim=dim, use_local_output=local)}
    inputs = {} if dim is None else {"input_layouts": Shard(dim)}
    outputs = {} if dim is None else {"output_layouts": Shard(dim)}
    sharded |= {
        "up": column(**inputs, use_local_output=local),
        "down": row(**outputs, use_local_output=local),
    }
    return {f"{i}.{name}": own for i in range(blocks) for name, own in sharded.items()}


def converted(made):
    return quire.convert(made, min_features=1)


def sharded_model(kind, dim, first="convert", local=True, **options):
    made = model(**options)
    if first == "convert":
        converted(made)
    parallelize_module(made, mesh(), plan(kind, len(made), dim, local))
    return made if first == "convert" else converted(made)


def model_passes(made, x, dy, recipe, run=None):
    """name -> y, gradient of x, and gradients of parameters, all of a DTensor's, of two steps."""
    found = {}
    for step in range(2):
        x = x.detach().clone().requires_grad_()
        made.zero_grad()
        with quire.autocast(enabled=recipe is not None, recipe=recipe):
            y = (run or made)(x)
        y.backward(dy)
        grads = {name: whole(parameter.grad) for name, parameter in made.named_parameters()}
        values = {"y": local(y), "dx": local(x.grad)} | grads
        found |= {f"{name} {step}": value.detach().clone() for name, value in values.items()}
    return found


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def model_data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*TOKENS, HIDDEN, generator=generator) for _ in range(2)]


def seeds(made):
    return {name: state.tolist() for name, state in quire.rng_state(made).items()}


def assert_close(found, expected, sums, where):
    """Equal, but for those whose names begin with one of `sums`: within the rounding of sums."""
    for name, value in expected.items():
        if name.startswith(tuple(sums)):
            assert_same_sums(found[name], value, HIDDEN, (*where, name))
        else:
            assert torch.equal(found[name], value), (*where, name, (found[name] - value).abs().max())


def all_ways_give_the_same(rank, recipe, dim):
    """PyTorch's styles and quire's, converted first or sharded first, of plain tensors and of DTensors."""
    x, dy = (t if dim is None else t.chunk(2, dim)[rank] for t in model_data())
    expected, expected_seeds = None, None
    for kind, first, plain in itertools.product(STYLES, ("convert", "parallelize"), (True, False)):
        if dim is None and not plain:
            continue
        made = sharded_model(kind, dim, first, plain)
        assert {type(block.up) for block in made} == {quire.Linear}
        given = (x, dy) if plain else [DTensor.from_local(t, mesh(), [Shard(dim)], run_check=False) for t in (x, dy)]
        states = seeds(made)
        found = model_passes(made, *given, TABLE[recipe])
        if expected is None:
            expected, expected_seeds = found, states
        # PyTorch computes what has no recipe, in another order. Of sharded tokens each process adds its own dy.
        sums = ("",) if recipe == "high_precision" else [f"{i}.down.bias" for i in range(len(made))]
        assert states == expected_seeds, (kind, first, states, expected_seeds)
        assert_close(found, expected, sums, (recipe, dim, kind, first, plain))


def block_equals_one_process(rank, recipe, division, norm, compiled):
    """One block, because what follows a sum over processes may get other codes."""
    (kind, dim), (x, dy) = division, model_data()
    one = converted(model(norm, 1))
    made = sharded_model(kind, dim, norm=norm, blocks=1)
    quire.set_rng_state(one, quire.rng_state(made))
    run = run_one = None
    if compiled is not None:
        torch.compiler.reset()
        run, run_one = (torch.compile(each, fullgraph=True, dynamic=False, **compiled) for each in (made, one))
    expected = model_passes(one, x, dy, TABLE[recipe], run_one)
    own = [t if dim is None else t.chunk(2, dim)[rank] for t in (x, dy)]
    found = model_passes(made, *own, TABLE[recipe], run)
    if dim is not None:
        expected |= {name: expected[name].chunk(2, dim)[rank] for name in expected if name[:2] in ("y ", "dx")}
    sums = ("",) if recipe == "high_precision" else ("y", "dx", "0.norm", "0.down.bias")
    assert_close(found, expected, sums, (recipe, kind, dim, norm))
