"""Recipes under test, one training step, an independent product of operands, golden vectors, a fresh compiler."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import forks
import quire
import steps
from every_recipe import DEFAULTS, VARIANTS, params
from quire.golden import cases
from quire.golden.cases import Golden
from quire.golden.comparison import unpack
from ranks import SPAWN, Ranks, forget
from steps import same


@pytest.fixture(params=params(DEFAULTS))
def recipe(request):
    """Each class of recipe with its defaults."""
    return request.param


@pytest.fixture(params=params(DEFAULTS | VARIANTS))
def any_recipe(request):
    """Recipes that use every option."""
    return request.param


@dataclass
class Step:
    """What a training step computes; grads that were not asked for are None."""

    y: torch.Tensor
    dx: torch.Tensor | None
    dw: torch.Tensor | None
    db: torch.Tensor | None

    def __eq__(self, other: "Step") -> bool:
        """Bit for bit."""
        return bool(same(vars(self), vars(other)))


@pytest.fixture
def with_one_cache(tmp_path):
    """Runs programs, each in a process, that have an Inductor cache of their own. Returns the JSON that one prints. The
    first is a fork, and the others hash differently."""
    # Not where the programs run: folders of the cache have names of two letters, and PyTorch would import "z3" there.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ":".join(sys.path)}
    script = tmp_path / "program.py"

    def run(program, *arguments):
        if not script.exists():
            script.write_text(program)
            done = forks.Program(script, *arguments, environment=environment).finished(300)
            assert done.returncode == 0, done.stderr
        else:
            command = [sys.executable, "-c", program, *arguments]
            every = os.environ | environment
            done = subprocess.run(command, env=every, stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path)
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def equal_bits():
    return same


@pytest.fixture
def make_layer(device):
    """(in, out, dtype=bfloat16) -> a seeded layer whose bias matters."""

    def make(in_features=96, out_features=64, dtype=torch.bfloat16, bias=True):
        torch.manual_seed(1)
        return quire.Linear(in_features, out_features, bias=bias, params_dtype=dtype).to(device)

    return make


@pytest.fixture
def make_x(device):
    """(*shape, dtype=bfloat16, requires_grad=True) -> a seeded tensor."""

    def make(*shape, dtype=torch.bfloat16, requires_grad=True):
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(requires_grad)

    return make


@pytest.fixture
def step():
    """(layer, x, recipe, function=layer) -> Step of function(x), from the same random state of the layer each time.

    enclose: backward runs within quire.autocast too, which activation checkpointing needs.
    """

    def run(layer, x, recipe, function=None, enclose=False):
        layer.sr_state[1] = 0
        backward = functools.partial(quire.autocast, recipe is not None and enclose, recipe=recipe)
        y, dx, *_ = steps.step(layer, x, recipe, function=function, dx=x.requires_grad, backward=backward)
        bias = layer.bias.grad if layer.bias is not None else None
        results = (y, dx, layer.weight.grad, bias)
        return Step(*(None if result is None else result.cpu() for result in results))

    return run


@pytest.fixture
def decode():
    """(QuantizedTensor, direction) -> float64 matrix [outer, contraction], as products see it."""

    def run(q, direction):
        columnwise = direction == "columnwise"
        data, scale, amax = (getattr(q, f"{direction}_{kind}") for kind in ("data", "scale", "amax"))
        amax = torch.empty(0, device=data.device) if amax is None else amax
        shape = (torch.Size(q.shape[:-1]).numel(), q.shape[-1])
        data = data if columnwise and q.spec.family != "mxfp8" else data.reshape(shape[0], -1)
        out = torch.ops.quire.dequantize(data, scale, amax, q.spec.text, columnwise, shape, torch.float32)
        return out.cpu().double()

    return run


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """The reader of the golden vectors."""
    folder = Path(os.environ.get("QUIRE_GOLDEN_DIR", "does not exist"))
    if not (folder / "manifest.json").exists():
        folder = tmp_path_factory.mktemp("golden")
        unpack(folder)
    return Golden(folder)


@pytest.fixture
def tensor_of(device):
    """(golden case, name) -> the tensor that the vector stores, in the case's own dtype."""

    return lambda case, name: cases.tensor_of(case, name, device)


@pytest.fixture
def compiler():
    """Compiles with fullgraph=True and counts graphs; starts with nothing compiled."""
    import torch._dynamo as dynamo

    class Compiler:
        def __call__(self, function, backend="aot_eager", **options):
            return torch.compile(function, fullgraph=True, backend=backend, **options)

        @property
        def graphs(self) -> int:
            return dynamo.utils.counters["stats"]["unique_graphs"]

        def __repr__(self) -> str:  # which pytest shows where an assertion about graphs fails
            reasons = [metrics.recompile_reason for metrics in dynamo.utils.get_compilation_metrics()]
            return f"Compiler that compiled again because of {[reason for reason in reasons if reason]}"

    def forget():
        dynamo.reset()
        dynamo.utils.counters.clear()
        dynamo.utils.clear_compilation_metrics()

    forget()
    yield Compiler()
    forget()


@pytest.fixture
def flushing():
    """Sets the mode when it is called."""

    def start():
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush subnormals to zero")

    yield start
    torch.set_flush_denormal(False)


@pytest.fixture
def surroundings(compiler, tmp_path, device, request):
    """What a Setting of every_way.py has beside recipe and model."""
    serve = functools.partial(request.getfixturevalue, "serve")
    return {"compiler": compiler, "folder": tmp_path, "serve": serve, "device": device}


@pytest.fixture(scope="session")
def ranks():
    """ranks(size): so many processes of a group, which tests of all files share. Each takes seconds to start."""
    made = {}

    def of(size):
        if size not in made:
            # A spawned process imports PyTorch, which is most of its time. Of two, one hashes differently.
            others = [SPAWN if size == 2 else forks.CONTEXT] * (size - 1)
            made[size] = Ranks(size, [forks.CONTEXT, *others])
        return made[size]

    yield of
    for group in made.values():
        group.close()


@pytest.fixture(scope="module")
def two(ranks):
    """Two processes of a group, which have nothing compiled when the first test of a file gets them."""
    ranks(2).run(forget)
    return ranks(2)


@pytest.fixture(scope="module")
def four(ranks):
    ranks(4).run(forget)
    return ranks(4)


@pytest.fixture
def new():
    """Two processes for one test, which leaves them in a collective."""
    ranks = Ranks(2, [forks.CONTEXT] * 2)
    yield ranks
    ranks.kill()
