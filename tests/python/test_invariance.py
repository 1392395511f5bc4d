"""Each cell of docs/invariance.md (every_invariance.py): a layer computes the same step in two ways, and the bits of y
and of both gradients are equal, or not, as the cell says."""

import contextlib
import copy
import functools
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import forks
import pytorch
import quire
from python.every_invariance import BOUND, CODES, EQUAL, HELD_BY, NONE, OPTION, RECIPES, RESULTS, ROWS, tables
from quire import recipe as recipes

K, N = 544, 520  # with fewer PyTorch's sums have one order for few tokens and many
TABLES = re.compile(r"(<!-- begin of tables -->\n\n)(.*?)(<!-- end of tables -->)", re.DOTALL)


def test_the_page_has_these_tables():
    found = TABLES.search((Path(__file__).parents[2] / "docs/invariance.md").read_text())
    assert found and found[2] == tables()


def drawn(*shape, seed):
    """Values of widely different magnitudes, so that sums in another order have other bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) ** 3 * 2.0 ** torch.randint(
        -6, 7, (shape[0], 1), generator=generator
    )


X, DY = drawn(256, K, seed=1), drawn(256, N, seed=6)
Step = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def within(recipe):
    """Delayed scaling is of quire.autocast alone; other recipes are the layer's own."""
    return quire.autocast(recipe=recipe) if is_delayed(recipe) else contextlib.nullcontext()


def is_delayed(recipe):
    return recipe is not None and recipe.delayed()


@functools.cache
def made(name):
    recipe = RECIPES[name]
    torch.manual_seed(0)
    layer = quire.Linear(K, N, recipe=None if is_delayed(recipe) else recipe)
    with torch.no_grad():
        layer.weight.copy_(drawn(N, K, seed=3) * 2.0 ** torch.randint(-6, 7, (1, K)))
        if "input_scale" in dict(layer.named_buffers()):
            layer.input_scale.fill_(0.5)
    for _ in range(2 if is_delayed(recipe) else 0):  # until scales follow from amaxes
        run(layer, recipe, X, DY)
    return layer


def run(layer, recipe, x, dy, function=None, **options) -> Step:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with within(recipe):
        y = (layer if function is None else function)(x, **options)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad.clone()


def step(name, x=X, dy=DY, wrap: Callable | None = None) -> Step:
    """One step of a copy of the layer. wrap: of the layer -> what is called instead."""
    layer = copy.deepcopy(made(name))
    return run(layer, RECIPES[name], x, dy, None if wrap is None else wrap(layer))


def forward(name, wrap) -> Step:
    """y alone of a copy of the layer."""
    layer = copy.deepcopy(made(name))
    with torch.no_grad(), within(RECIPES[name]):
        return wrap(layer)(X), None, None


def rows_of(found: Step, rows) -> Step:
    y, dx, dw = found
    return y[rows], dx[rows], dw


# ------------------------------------------------------------ what changes: name -> two steps that are compared


def batch_size(name):
    few, many = slice(7), slice(40)  # fewer and more than the 32 from which NVFP4 on AMX has another kernel
    return step(name, X[few], DY[few]), rows_of(step(name, X[many], DY[many]), few)


def position(name):
    order = torch.randperm(256, generator=torch.Generator().manual_seed(4))
    return step(name, X[order], DY[order]), rows_of(step(name), order)


def padding(name):
    padded = [torch.cat([t[:16], torch.zeros(24, t.shape[1])]) for t in (X, DY)]
    return rows_of(step(name, *padded), slice(16)), step(name, X[:16], DY[:16])


def microbatches(name):
    parts = [step(name, X[rows], DY[rows]) for rows in (slice(128), slice(128, 256))]
    y, dx = (torch.cat([part[i] for part in parts]) for i in range(2))
    return (y, dx, parts[0][2] + parts[1][2]), step(name)


def threads(name):
    several, before = step(name), torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        return step(name), several
    finally:
        torch.set_num_threads(before)


def compiled(name):
    torch.compiler.reset()
    return step(name, wrap=lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True)), step(name)


def program_of(name):
    """The layer for capture, which enters all contexts itself, so that what is captured has them."""
    layer, recipe = copy.deepcopy(made(name)).requires_grad_(False), RECIPES[name]

    class Program(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            with within(recipe), quire.batch_invariant(ROWS["eager or torch.export"]["y"][name] == OPTION):
                return self.layer(x)

    return Program()


def exported(name):
    file = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(program_of(name), (X,)), file)
    file.seek(0)
    return (torch.export.load(file).module()(X), None, None), forward(name, lambda layer: layer)


def converted(layer, name, **options):
    return quire.convert(layer, RECIPES[name], for_inference=True, tokens=None, like="training", **options)


def prepacked(name):
    def unpacked(layer):
        quire.unpack_weights(converted(layer, name))
        return layer

    return forward(name, lambda layer: converted(layer, name)), forward(name, unpacked)


def kept(name):
    def with_kept_codes(layer):
        with torch.no_grad():
            layer(X[:8], is_first_microbatch=True)
        return functools.partial(layer, is_first_microbatch=False)

    if not is_delayed(RECIPES[name]):
        return step(name, wrap=with_kept_codes), step(name)

    def both(layer):  # of one step, whose scales are the same
        def call(x):
            layer(X[:8], is_first_microbatch=True)
            return layer(x, is_first_microbatch=False)

        return call

    return step(name, wrap=both), step(name)


def inference(name):
    return forward(name, lambda layer: converted(layer, name)), step(name)


def resumed(name):
    """The second step of a run, and that of one that was saved and loaded after the first."""
    layer, recipe = copy.deepcopy(made(name)), RECIPES[name]
    run(layer, recipe, X[:64], DY[:64])
    file = io.BytesIO()
    scales = quire.delayed_state(layer) if is_delayed(recipe) else None
    torch.save((layer.state_dict(), quire.rng_state(layer), scales), file)
    file.seek(0)
    state, random, scales = torch.load(file)
    torch.manual_seed(1)
    other = quire.Linear(K, N, recipe=None if is_delayed(recipe) else recipe)
    other.load_state_dict(state)
    quire.set_rng_state(other, random)
    if scales is not None:
        quire.set_delayed_state(other, scales)
    return run(other, recipe, X, DY), run(layer, recipe, X, DY)


PAIRS = {
    "batch size": batch_size,
    "position in the batch": position,
    "padding by rows of zeros": padding,
    "microbatches": microbatches,
    "threads": threads,
    "eager or torch.compile": compiled,
    "eager or torch.export": exported,
    "weights prepacked or not": prepacked,
    "codes of the weight kept or not": kept,
    'training or inference (like="training")': inference,
    "checkpoint and resume": resumed,
}


# ------------------------------------------------------------ the cells


def equal(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def near(found, expected, magnitudes):
    """Whether both are within the bound of numerics.md 7.5 of the same sum. magnitudes: the sum of those of its terms,
    which quantization increases by less than a half."""
    terms = 2 * K
    return bool(((found - expected).abs() <= 2 * (terms + 12) * 2.0**-24 * 1.5 * magnitudes).all())


@functools.cache
def magnitudes(name, result):
    w = made(name).weight.detach().abs()
    x, dy = X.abs(), DY.abs()
    return {"y": x @ w.T + 1, "dx": dy @ w, "dw": dy.T @ x}[result]


def holds(word, name, result, pair):
    """Whether a pair of results is as the word says."""
    found, expected = pair
    if word in (EQUAL, OPTION):
        return equal(found, expected)
    if word == CODES:
        return not equal(found, expected)
    return near(found, expected, magnitudes(name, result)[: found.shape[0]])


@functools.cache
def pair_of(what, name, option):
    with quire.batch_invariant(option):
        return PAIRS[what](name)


def cells(rows):
    """Of each row and recipe one test, which checks all results."""
    return [(what, name) for what in rows for name in RECIPES if {ROWS[what][r][name] for r in RESULTS} != {NONE}]


@pytest.mark.parametrize(("what", "name"), cells(PAIRS))
def test_bits_are_as_the_table_says(what, name):
    for i, result in enumerate(RESULTS):
        word = ROWS[what][result][name]
        if word == NONE:
            continue
        found, expected = pair_of(what, name, word == OPTION)
        assert holds(word, name, result, (found[i], expected[i])), f"{result} is not as the table says: {word}"


SIDE = 1024
#: For AMX: sums of codes of 4 bits are exact, unless the scales of their blocks differ widely.
OF_BLOCKS = recipes.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, disable_2d_quantization=True)


@pytest.mark.parametrize("recipe", [None, RECIPES["weights only"], OF_BLOCKS], ids=["none", "weights only", "nvfp4"])
def test_few_tokens_and_many_differ_without_the_option(recipe):
    columns = 2.0 ** torch.randint(-6, 7, (1, SIDE), generator=torch.Generator().manual_seed(5))
    layer = quire.Linear(SIDE, SIDE, recipe=recipe).requires_grad_(False)
    layer.weight.copy_(drawn(SIDE, SIDE, seed=3) * columns)
    x = drawn(64, SIDE, seed=1) * columns
    with quire.batch_invariant():
        assert equal(layer(x[:7]), layer(x)[:7])
    differ = not equal(layer(x[:7]), layer(x)[:7])
    if recipe is OF_BLOCKS:
        few, many = ([step.kernel for step in quire.explain(layer, rows).products] for rows in (x[:7], x))
        assert differ == (few != many)
    elif not differ:
        pytest.skip("PyTorch has one order of sums for 7 and 64 tokens on this CPU")


ISA_STEPS = """
import sys
import torch
import test_invariance as cells
torch.save({name: cells.step(name) for name in cells.RECIPES}, sys.argv[1])
"""


def test_another_instruction_set_gives_sums_within_the_bound(tmp_path):
    assert {word for result in RESULTS for word in ROWS["instruction set"][result].values()} == {BOUND}
    path = tmp_path / "steps.pt"
    program = f"import sys; sys.argv = ['', {str(path)!r}]; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    forks.run(program + ISA_STEPS, QUIRE_ISA="scalar")
    for name, steps in torch.load(path).items():
        for result, found, expected in zip(RESULTS, steps, step(name), strict=True):
            assert near(found, expected, magnitudes(name, result)), (name, result)


class Programs(torch.nn.Module):
    """All of them, for one package."""

    def __init__(self):
        super().__init__()
        self.programs = torch.nn.ModuleList(program_of(name) for name in RECIPES)

    def forward(self, x):
        return [program(x) for program in self.programs]


@pytest.mark.slow
@pytorch.aotinductor
def test_a_package_of_aotinductor_gives_the_bits_of_eager_mode(tmp_path):
    assert ROWS["eager or AOTInductor, also from C++"] == ROWS["eager or torch.export"]
    programs = Programs()
    with torch.no_grad():
        program = torch.export.export(programs, (X,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        found, expected = torch._inductor.aoti_load_package(path)(X), programs(X)
    for name, a, b in zip(RECIPES, found, expected, strict=True):
        assert equal(a, b), name


def test_every_row_has_a_test(request):
    here = {*PAIRS, "instruction set", "eager or AOTInductor, also from C++"}
    assert here | set(HELD_BY) == set(ROWS) and not here & set(HELD_BY)
    root = Path(__file__).parents[2]
    for file, test in HELD_BY.values():
        assert re.search(rf"^def {test}\(", (root / file).read_text(), re.MULTILINE), f"{file} has no {test}"


def test_a_rank_of_data_parallel_training_is_a_microbatch():
    assert ROWS["data parallel"] == ROWS["microbatches"]
