"""Models that processes divide in several ways and save and load with torch.distributed.checkpoint, for functions that
tests/ranks.py runs."""

import copy
import functools
import warnings
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import quire
import ranks
from every_recipe import TABLE
from quire.distributed import ColumnParallel, Parallel, RowParallel
from ranks import here

HIDDEN, INNER, TOKENS = 128, 256, 16
PARTS = (128, 64, 64)


class Model(torch.nn.Module):
    """parallel: mode -> Parallel or None. Of quire's layers one has two matmuls, and one is never sharded."""

    def __init__(self, parallel=lambda mode, **_: None, activation="swiglu"):
        super().__init__()
        self.mlp = quire.LayerNormMLP(HIDDEN, INNER, activation=activation, parallel=parallel("column"))
        self.up = quire.Linear(HIDDEN, INNER, parallel=parallel("column", parts=PARTS))
        self.down = quire.Linear(INNER, HIDDEN, parallel=parallel("row"))
        self.head = quire.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        x = x + self.mlp(x)
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(x))))


@functools.cache
def mesh(size):
    return init_device_mesh(ranks.place, (size,))


def one(**options):
    return here(Model(**options))


def replicas(**options):
    return torch.nn.parallel.DistributedDataParallel(one(**options), init_sync=False)


def fully_sharded(**options):
    model, over = one(**options), mesh(distributed.get_world_size())
    for layer in (model.mlp, model.up, model.down, model.head):
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def tensor_parallel(**options):
    with quire.distributed.data_parallel_rank(0):
        return here(Model(lambda mode, **kind: Parallel(mode, distributed.group.WORLD, **kind), **options))


@functools.cache
def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def sharded_by_both(**options):
    """Of four processes, pairs divide layers, and pairs divide their parts by fully_shard."""
    with quire.distributed.data_parallel_rank(grid()["dp"].get_local_rank()):
        model = Model(lambda mode, **kind: Parallel(mode, grid()["tp"].get_group(), **kind), **options)
    for layer in (model.mlp, model.up, model.down, model.head):
        fully_shard(layer, mesh=grid()["dp"])
    return fully_shard(model, mesh=grid()["dp"])


def styled(column=ColumnParallel, row=RowParallel, activation="gelu"):
    with quire.distributed.data_parallel_rank(0):
        model = Model(activation=activation)
        plan = {"up": column(), "down": row(), "mlp": ColumnParallel()}
        return parallelize_module(model, mesh(distributed.get_world_size()), plan)


def compiled(**options):
    return torch.compile(one(**options), backend="eager")


WAYS = {
    "one process": one,
    "DistributedDataParallel": replicas,
    "fully_shard": fully_sharded,
    "parallel=": tensor_parallel,
    "parallel= and fully_shard": sharded_by_both,
    "styles": styled,
    "styles of PyTorch": lambda **options: styled(ColwiseParallel, RowwiseParallel, **options),
    "torch.compile": compiled,
}


def data_rank(way):
    """Which tokens this process has."""
    if way in ("DistributedDataParallel", "fully_shard"):
        return distributed.get_rank()
    return grid()["dp"].get_local_rank() if way == "parallel= and fully_shard" else 0


class Run:
    """A model in training. storage: options of quantized_model_init, or None."""

    def __init__(self, way, recipe, storage=None, seed=0, activation=None):
        activation = activation or ("gelu" if "styles" in way else "swiglu")
        torch.manual_seed(seed)
        self.way, self.recipe, self.activation = way, TABLE[recipe], activation
        of_weights = {"recipe": self.recipe, **storage} if storage is not None else {"enabled": False}
        with quire.quantized_model_init(**of_weights):
            self.model = WAYS[way](activation=activation)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = quire.TrainingState(self.model, self.optimizer, self.recipe)

    def step(self, number):
        """The parameters after it, as this process has them, and what is beside them."""
        rank = data_rank(self.way)
        x = here(torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * number + rank)))
        with quire.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            self.model(x).square().mean().backward()
        self.optimizer.step()
        ranks.settle()
        self.optimizer.zero_grad()
        return self.values()

    def values(self):
        found = {name: local(parameter.detach()) for name, parameter in self.model.named_parameters()}
        found |= {f"rng {name}": state for name, state in quire.rng_state(self.model).items()}
        for name, parameter in self.model.named_parameters():
            found |= {f"{name} {key}": local(t) for key, t in self.optimizer.state[parameter].items()}
        return {name: copy.deepcopy(value) for name, value in found.items()}


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def assert_same(found, expected, where=""):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        assert type(other) is type(value), (where, name)
        if isinstance(value, quire.QuantizedTensor):
            buffers = [(t, other.named()[key]) for key, t in value.named().items()]
            assert all(a is b is None or torch.equal(a, b) for a, b in buffers), (where, name)
        else:
            assert torch.equal(other, value), (where, name, (other - value).abs().max())


# ---------------------------------------------------------------- one way, saved and loaded


def resumes(rank, folder, way, recipe, storage):
    """A run that is saved in the middle, and goes on in a new model, takes the steps of one that is not."""
    run = Run(way, recipe, storage)
    run.step(0), run.step(1)
    # Copies to the host one after another: the test device has no pinned memory, to which PyTorch would copy ahead.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=10_000_000 * (ranks.place != "quiretest"))
    dcp.save({"train": run.state}, storage_writer=writer, no_dist=way == "one process")
    expected = [run.step(2), run.step(3)]
    again = Run(way, recipe, storage, seed=5)
    dcp.load({"train": again.state}, checkpoint_id=folder, no_dist=way == "one process")
    for number, values in zip((2, 3), expected, strict=True):
        assert_same(again.step(number), values, (way, recipe, storage, number))
    if rank == 0:
        check_files(folder)


def check_files(folder):
    for path in Path(folder).iterdir():
        read = path.read_bytes()
        assert b"quire" not in read and b"QuantizedTensor" not in read, path


# ---------------------------------------------------------------- one way saved, another loaded


def trains_and_saves(rank, folder, way, recipe, activation):
    """Returns the whole weights and optimizer states, as the test puts them together."""
    run = Run(way, recipe, activation=activation)
    run.step(0), run.step(1)
    dcp.save({"train": run.state}, checkpoint_id=folder)
    return wholes(run)


def loads(rank, folder, way, recipe, activation):
    run = Run(way, recipe, seed=5, activation=activation)
    dcp.load({"train": run.state}, checkpoint_id=folder, no_dist=way == "one process")
    found = wholes(run)
    run.step(2)
    return found


def wholes(run):
    found = {}
    fc1 = (INNER, INNER) if run.activation == "swiglu" else (INNER,)
    parts = {"mlp.fc1_weight": fc1, "mlp.fc1_bias": fc1, "up.weight": PARTS, "up.bias": PARTS}
    for name, parameter in run.model.named_parameters():
        for key, t in {"": parameter.detach(), **run.optimizer.state[parameter]}.items():
            if isinstance(t, DTensor):
                t = t.full_tensor()
            if "parallel=" in run.way and t.dim() > 0:
                group = grid()["tp"].get_group() if "and" in run.way else distributed.group.WORLD
                t = joined(name, t, parts, group)
            found[f"{name.removeprefix('module.')} {key}"] = t.tolist()
    rank = data_rank(run.way)
    states = quire.rng_state(run.model).items()
    found |= {f"rng {name.removeprefix('module.')}": [of_rank(state[0], rank), int(state[1])] for name, state in states}
    for name, state in quire.delayed_state(run.model).items():
        kept = ("rule", "scale_fwd", "scale_bwd")
        found |= {f"{name.removeprefix('module.')} {key}": plain(state[key]) for key in kept}
    return found


def of_rank(seed, rank):
    return int(seed) ^ (rank * 0x9E3779B97F4A7C15 % 2**63)


def plain(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


def joined(name, part, parts, group):
    """The whole of which each process has a part."""
    each = [torch.empty_like(part) for _ in range(group.size())]
    distributed.all_gather(each, part.contiguous(), group)
    if name in ("down.weight", "mlp.fc2_weight"):
        return torch.cat(each, 1)
    if name not in parts:
        return part
    sizes = [size // len(each) for size in parts[name]]
    return torch.cat([torch.cat(pieces) for pieces in zip(*[one.split(sizes) for one in each], strict=True)])


# ---------------------------------------------------------------- other


def saves_in_background(rank, folder):
    run = Run("parallel=", "nvfp4")
    run.step(0)
    before = run.values()
    own = distributed.new_group()  # a thread uses it while the main one trains
    saved = dcp.async_save({"train": run.state}, checkpoint_id=folder, process_group=own)
    run.step(1)
    saved.result()
    again = Run("parallel=", "nvfp4", seed=5)
    dcp.load({"train": again.state}, checkpoint_id=folder)
    assert_same(again.values(), before)


def entries_are_refused(rank, folder):
    """The error of a sharded layer's state_dict that is given to torch.distributed.checkpoint itself."""
    state, said = {"model": tensor_parallel().state_dict()}, []
    parts = {name: torch.zeros(t.shape) for name, t in state["model"].items()}
    dcp.save({"model": parts}, checkpoint_id=f"{folder}/parts")
    for act in (
        functools.partial(dcp.save, checkpoint_id=folder),
        functools.partial(dcp.load, checkpoint_id=f"{folder}/parts"),
    ):
        try:
            act(state)
        except BaseException as error:  # CheckpointException is no Exception
            said.append(str(error))
    return said


def stages(rank, folder):
    """Each process has a layer of its own, as with pipeline parallelism."""
    alone = [distributed.new_group([each]) for each in range(2)][rank]

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.ModuleDict({f"stage{rank}": quire.Linear(32, 32 + rank)})
        return model, quire.TrainingState(model, torch.optim.AdamW(model.parameters()), group=alone)

    model, state = make(rank)
    dcp.save({"train": state}, checkpoint_id=folder)
    other, state = make(5)
    dcp.load({"train": state}, checkpoint_id=folder)
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()))
    assert_same(quire.rng_state(other), quire.rng_state(model))


def disagrees(rank):
    """Each process's error or warning where processes have different things."""
    torch.manual_seed(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quire.TrainingState(Model()).state_dict()
    said = [str(one.message) for one in caught if "TrainingState" in str(one.message)]
    recipe = quire.recipe.DelayedScaling(amax_history_len=4, reduce_amax=False)
    torch.manual_seed(0)
    model = Model()
    for _ in range(2):
        with quire.autocast(recipe=recipe):
            model(torch.full((TOKENS, HIDDEN), 1.0 + rank)).sum().backward()
    other = Model() if rank else quire.Linear(2, 2)
    for state in (quire.TrainingState(model, recipe=recipe), quire.TrainingState(other)):
        try:
            state.state_dict()
        except RuntimeError as error:
            said.append(str(error))
    return said


def unsharded_layers(rank):
    """Seeds of layers, and a rounded gradient of one, in a mesh of two data-parallel times two tensor-parallel."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    torch.manual_seed(0)
    with quire.distributed.data_parallel_rank(grid["dp"].get_local_rank()):
        head = quire.Linear(32, 32)
        found["head"] = head.sr_state.tolist()[0]
        found["sharded"] = int(quire.Linear(32, 32, parallel=Parallel("column", grid["tp"].get_group())).sr_state[0])
        found["converted"] = int(quire.convert(torch.nn.Linear(32, 32), min_features=1).sr_state[0])
        with quire.distributed.data_parallel_rank(rank):
            found["tokens"] = int(quire.Linear(32, 32).sr_state[0])
    torch.manual_seed(1)
    found["not told"] = int(quire.Linear(32, 32).sr_state[0])
    torch.manual_seed(2)
    again = copy.deepcopy(head)
    again.reset_parameters()  # outside of the context
    found["reset"] = int(again.sr_state[0])
    with quire.autocast(recipe="nvfp4"):
        head(torch.ones(16, 32)).backward(torch.linspace(-1, 1, 16 * 32).view(16, 32))
    return found, head.weight.grad.tolist()


def sharded_without_a_rank(rank):
    """Layers that are sharded after their seeds were drawn, each by the rank of its process."""
    torch.manual_seed(0)
    plan = {"up": ColumnParallel(), "down": RowParallel(), "mlp": ColumnParallel()}
    model = parallelize_module(Model(activation="gelu"), mesh(2), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state = quire.TrainingState(model).state_dict()
    torch.manual_seed(0)
    return {name: t.tolist() for name, t in state["rng"].items()}, quire.rng_state(Model(activation="gelu"))
