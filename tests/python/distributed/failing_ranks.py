"""What ranks do in tests of ranks that end, hang, or call other things than the rest. For tests/ranks.py."""

import contextlib
import copy
import functools
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

import quire
from every_recipe import STATIC
from python.distributed.parallel_layers import with_scales
from quire.distributed import Parallel, check_ranks
from ranks import PATIENCE

#: Seconds that collectives of these tests wait.
SHORT = 3
TOKENS = 32


class Block(torch.nn.Module):
    def __init__(self, group, sequence):
        super().__init__()
        self.up = quire.Linear(64, 128, parallel=Parallel("column", group, sequence))
        self.down = quire.Linear(128, 64, parallel=Parallel("row", group, sequence))

    def forward(self, x):
        return self.down(self.up(x))


def block(sequence):
    torch.manual_seed(0)
    return Block(distributed.new_group(timeout=timedelta(seconds=SHORT)), sequence)


def patient_group():
    """A group whose ranks may compile at different speeds, until hurry()."""
    return distributed.new_group(timeout=timedelta(seconds=PATIENCE))


def hurry(group):
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT), group)


def tokens(count=TOKENS, features=64):
    return torch.randn(count, features, requires_grad=True)


def message(run: Callable[[], object]) -> tuple[str, str, float]:
    """The class of the error, its text with notes, and after how many seconds it came."""
    begin = time.monotonic()
    try:
        run()
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return type(error).__name__, text, time.monotonic() - begin
    return "", "", time.monotonic() - begin


def other_rank_in_forward(rank, recipe, sequence, act):
    """act: "ends" or "hangs", what rank 1 does instead of the second step."""
    model, x = block(sequence), tokens()
    with quire.autocast(recipe=recipe):
        model(x).sum().backward()
        if rank == 1:
            return leave(act)
        return message(lambda: model(x))


def other_rank_in_backward(rank, sequence, act):
    model, x = block(sequence), tokens()
    with quire.autocast(recipe="fp8_current"):
        y = model(x).sum()
    if rank == 1:
        return leave(act)
    return message(y.backward)


def compiled(rank):
    """Rank 1 ends. What rank 0, which is compiled, tells about it, of a forward and of a backward pass: the error, and
    the comments of the generated code above the line that failed; and what TORCH_LOGS=graph_code logged."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torch._dynamo").addHandler(handler)
    torch._logging.set_logs(graph_code=True)
    group, x = patient_group(), tokens()
    run = torch.compile(Block(group, False), fullgraph=True)
    with quire.autocast(recipe="mxfp8"):
        y = run(x).sum()
        y.backward(retain_graph=True)
        hurry(group)
        if rank == 1:
            return leave("ends")
        return line_that_failed(lambda: run(x)), line_that_failed(y.backward), "\n".join(lines)


def line_that_failed(call):
    """(error, comments above)."""
    try:
        call()
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        (failed,) = [frame for frame in frames if "_c10d_functional" in frame.line]
        above = Path(failed.filename).read_text().splitlines()[: failed.lineno]
        return str(error), [line.strip() for line in above if "Source Nodes" in line]


def interrupted(rank):
    """Ctrl-C while rank 0 waits in a backward pass: the class of what is raised."""
    model, x = block(False), tokens()
    with quire.autocast(recipe="fp8_current"):
        y = model(x).sum()
    store = distributed.distributed_c10d._get_default_store()

    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are told to ignore it
        store.set("process", str(os.getpid()))
    else:
        process = int(store.get("process"))
        store.delete_key("process")
        time.sleep(1)  # rank 0 is waiting: an exception of Python's own code before that may be dropped by PyTorch
        os.kill(process, signal.SIGINT)
        time.sleep(0.5)  # Python raises it when the collective looks
    try:
        y.backward()
        time.sleep(0.1)
    except BaseException as error:
        return type(error).__name__
    return ""


def paths(rank):
    """Of a layer, of its copy in another model, and of a compiled layer; and the `path` that a module has itself."""
    model = block(False)
    model.path = None
    model(tokens())
    other = torch.nn.Sequential(copy.deepcopy(model))
    other(tokens())
    alone = copy.deepcopy(model.up)
    with torch.compiler.set_stance("force_eager"):  # compiled code says nothing of paths
        torch.compile(alone)(tokens())
    return model.up.path_in_model, other[0].up.path_in_model, alone.path_in_model, model.path


def leave(act):
    if act == "ends":
        os._exit(3)
    time.sleep(2 * SHORT)


def states_differ(rank):
    """Rank 1 leaves a layer with delayed scaling out, and ranks are compared."""
    os.environ["QUIRE_CHECK_RANKS"] = "1"
    try:
        first, second = quire.Linear(32, 32), quire.Linear(32, 32)
        recipe = quire.recipe.DelayedScaling()
        with quire.autocast(recipe=recipe):
            y = first(torch.randn(32, 32))
            if rank == 0:
                second(y)

        def next_step():
            with quire.autocast(recipe=recipe):
                pass

        return message(next_step)
    finally:
        del os.environ["QUIRE_CHECK_RANKS"]


def alike_sizes(rank, kind):
    """Rank 1 differs by `kind`, and QUIRE_CHECK_RANKS is not set. What the call says on each rank."""
    torch.manual_seed(0)
    differs, recipe, x = rank == 1, "mxfp8", tokens()
    if kind in ("sequence", "exact", "tokens", "recipe", "later", "earlier"):
        model = block(kind in ("sequence", "exact"))
        if kind in ("later", "earlier"):
            with quire.autocast(recipe=recipe):
                model(x)
            differs = (rank == 1) is (kind == "later")
        x = tokens(TOKENS + 16) if differs and kind != "recipe" else x
        recipe = "nvfp4" if differs and kind == "recipe" else recipe
    elif kind in ("capacity", "features"):
        group = distributed.new_group(timeout=timedelta(seconds=SHORT))
        hidden, capacity = (96 if differs else 64, 8) if kind == "features" else (64, 9 if differs else 8)
        model = quire.MoE(hidden, 32, 4, ep_group=group, ep_capacity=capacity, ep_overflow="drop")
        x = torch.randn(4, hidden)
    else:
        return whole_models(kind, differs)

    def step():
        with quire.autocast(recipe=recipe), quire.distributed.exact() if kind == "exact" else contextlib.nullcontext():
            model(x).sum().backward()

    return message(step)


def compiled_sizes(rank, parts, options, recipe, backend):
    """Compiled layers get other tokens on rank 1 than on rank 0: in their first call, and after calls that all ranks
    make alike. What each of the calls says, and at last one where rank 1 alone has other tokens than before."""
    torch.manual_seed(0)
    torch.compiler.reset()
    group = patient_group()
    sizes = {"column": (64, 128), "row": (128, 64)}
    model = torch.nn.Sequential(
        *[quire.Linear(*sizes[mode], parallel=Parallel(mode, group, **options)) for mode in parts.split("+")]
    )
    run = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)

    def step(count):
        with quire.autocast(enabled=recipe is not None, recipe=recipe or "mxfp8"):
            run(torch.randn(count, 64, requires_grad=True)).sum().backward()

    counts = [64 if rank else 32, 32, 32, 64, 96 if rank else 32, 64]
    said = [message(functools.partial(step, count)) for count in counts]
    hurry(group)
    return [*said, message(functools.partial(step, 80 if rank else 64))]


def compiled_layouts(rank, kind, way):
    """Rank 1 differs by `kind`, which is a constant of its graph. way: a backend of torch.compile, or "export". What
    that call says, and two more that all ranks make alike."""
    torch.compiler.reset()
    group = patient_group()
    said = []
    for differs in (rank == 1, False, False):
        torch.manual_seed(0)
        model, x, recipe = layout(kind, differs, group)
        with quire.autocast(enabled=recipe is not None, recipe=recipe or "mxfp8"):
            said.append(message(lambda: compiled_step(model, x, way)))  # noqa: B023 (called at once)
    return said


def layout(kind, differs, group):
    """(model, x, recipe)."""
    if kind in ("capacity", "features", "experts", "dispatch"):
        hidden, capacity = 96 if differs and kind == "features" else 64, 8 + 64 * (differs and kind == "capacity")
        options = {"ep_capacity": None if kind == "experts" else capacity, "ep_overflow": "drop"}
        recipe = quire.recipe.MXFP8BlockScaling(backward_override="dequantized")
        dispatch = "codes" if differs and kind == "dispatch" else "values"
        experts = 8 if differs and kind == "experts" else 4
        return (
            quire.MoE(hidden, 32, experts, ep_group=group, ep_dispatch=dispatch, **options),
            tokens(4, hidden),
            recipe,
        )
    recipes = {
        "codes": ("mxfp8", "nvfp4"),
        "amaxes": ("fp8_current", "x=mxfp8,w=fp8_row,dy=mxfp8"),
        "values": (None,) * 2,
    }
    model = quire.Linear(128, 64)
    quire.distributed.shard_weights(model, distributed.device_mesh.init_device_mesh("cpu", (2,)), recipes[kind][0])
    if kind == "values" and differs:
        model.bfloat16()
    return model, torch.randn(32, 128, dtype=model.weight.dtype), recipes[kind][differs]


def compiled_step(model, x, way):
    if way != "export":
        return torch.compile(model, fullgraph=True, backend=way)(x).sum().backward()
    with torch.no_grad():
        return torch.export.export(model, (x,)).module()(x)


def apart(rank):
    """Rank 0 compares sizes once more than rank 1, which does not come. What both say of the next sizes."""
    group = distributed.new_group(timeout=timedelta(seconds=SHORT))
    owner = torch.nn.Module()

    def ask(size):
        said = ("a call", {"tokens": size})
        device = torch.device("cpu")
        return message(lambda: check_ranks.agree(owner, "part", (size,), lambda: said, group, device=device))

    first = ask(2) if rank == 0 else None
    distributed.barrier()
    return first, ask(7)


def agreed_before(rank):
    """Sizes change on both ranks; then rank 1 alone is back at the first ones. What each says of its last call."""
    group = distributed.new_group(timeout=timedelta(seconds=SHORT))
    owner = torch.nn.Module()

    def ask(size):
        said = ("a call", {"tokens": size})
        device = torch.device("cpu")
        return message(lambda: check_ranks.agree(owner, "part", (size,), lambda: said, group, device=device))

    assert [ask(size)[0] for size in (2, 7, 2, 7)] == [""] * 4
    return ask(7 if rank == 0 else 2)


def whole_models(kind, differs):
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(quire.Linear(128, 96 if differs and kind == "shard_weights" else 64))
    recipe = "nvfp4" if differs and kind in ("rows", "gather_codes") else "mxfp8"
    if kind == "delayed":
        recipe = quire.recipe.DelayedScaling()
        model.append(quire.Linear(64, 128))

        def steps():
            for _ in range(2):
                with quire.autocast(recipe=recipe):
                    (model[0] if differs else model)(torch.randn(32, 128))

        return message(steps)
    if kind == "gather_codes":
        quire.distributed.gather_codes(model, recipe)
        distributed.fsdp.fully_shard(model, mesh=mesh)
    else:
        found = message(lambda: quire.distributed.shard_weights(model, mesh, recipe))
        if kind == "shard_weights":
            return found

    def step():
        with quire.autocast(recipe=recipe):
            model(torch.randn(32, 128)).sum().backward()

    return message(step)


def checked(rank, change):
    """Rank 1 differs by `change` in its second step, and ranks are compared."""
    os.environ["QUIRE_CHECK_RANKS"] = "1"
    try:
        model, x, recipe = block(False), tokens(), STATIC["static_fp8"] if change == "scale" else "fp8_current"
        if change == "scale":
            with_scales(model, recipe)
        run = torch.compile(model, fullgraph=True)
        with quire.autocast(recipe=recipe):
            expected = run(x)
        if rank == 1 and change == "shape":
            x = tokens(TOKENS + 16)
        if rank == 1 and change == "recipe":
            recipe = "mxfp8"
        if rank == 1 and change == "scale":
            model.down.input_scale.mul_(2)
        if rank == 1 and change == "stays away":
            time.sleep(2 * SHORT)
            return None
        if rank == 1 and change == "layer":
            run = model.down
            x = torch.randn(TOKENS, 64)

        def step():
            with quire.autocast(recipe=recipe):
                return run(x)

        found = message(step)
        if not found[0] and not torch.equal(step(), expected):
            raise AssertionError("ranks were compared, and the result is another")
        return found
    finally:
        del os.environ["QUIRE_CHECK_RANKS"]
        torch.compiler.set_stance("default")


def seeds_differ(rank, kind, then):
    """Layers that each rank draws after its own seed. then: what is done with them before the first call."""
    os.environ["QUIRE_CHECK_RANKS"] = "1"
    try:
        torch.manual_seed(0 if then == "one seed" else rank)
        group = distributed.new_group(timeout=timedelta(seconds=SHORT))
        if kind == "experts":
            model = quire.MoE(64, 64, 4, ep_group=group)
        else:
            model = Block(group, False)
        if then == "loaded":
            model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        return message(lambda: model(torch.ones(TOKENS, 64)))
    finally:
        del os.environ["QUIRE_CHECK_RANKS"]
        torch.compiler.set_stance("default")
