"""torch.compile and sizes that change, and how many graphs that takes."""

import pytest
import torch
import torch._dynamo as dynamo

import quire
from quire.recipe import NVFP4BlockScaling

#: Below and above the length of every format's blocks.
BATCHES = [160, 7, 300, 33, 2, 16, 100]


def marking(mark, function):
    def run(x):
        if mark is not None:
            mark(x, 0)
        return function(x)

    return run


@pytest.fixture
def check(make_layer, make_x, step, compiler):
    """(recipe, batches, mark) -> compares a compiled layer with itself in eager mode for each number of rows."""

    def run(recipe, batches, mark):
        layer = make_layer()
        compiled = compiler(layer)
        for rows in batches:
            x = make_x(rows, 96)
            assert step(layer, x, recipe, marking(mark, compiled)) == step(layer, x, recipe)

    return run


def test_a_dynamic_batch_takes_one_graph(check, recipe, compiler):
    check(recipe, BATCHES, dynamo.mark_dynamic)
    assert compiler.graphs == 1


@pytest.mark.parametrize("square", [False, True], ids=["1d", "2d"])
def test_packed_codes_of_few_tokens_do_not_fix_a_dynamic_batch(square, check, compiler):
    recipe = NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=not square)
    check(recipe, [2, 33, 5, 16], dynamo.mark_dynamic)  # 2 tokens are one byte of codes
    assert compiler.graphs == 1


def test_packed_codes_of_a_norm_and_an_activation_do_not_either(equal_bits, compiler):
    layer, recipe = quire.LayerNormMLP(64, 96), NVFP4BlockScaling(disable_rht=True)
    compiled = compiler(layer)
    for rows in (2, 33, 5, 16):
        gradients = []
        for function in (marking(dynamo.mark_dynamic, compiled), layer):
            x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows), requires_grad=True)
            layer.fc1_sr_state[1] = layer.fc2_sr_state[1] = 0
            with quire.autocast(recipe=recipe):
                function(x).sum().backward()
            gradients.append(x.grad)
        assert equal_bits(*gradients)
    assert compiler.graphs == 1


def test_an_unbacked_batch_takes_one_graph_for_any_size(check, recipe, compiler):
    check(recipe, [0, 1, 7, 33, 100, 200], dynamo.decorators.mark_unbacked)
    assert compiler.graphs == 1


def test_a_first_batch_of_the_size_of_a_random_state_fixes_nothing(make_layer, make_x, step, compiler):
    layer = make_layer()
    compiled = compiler(layer, dynamic=True)
    for rows in (2, 33, 5):
        x = make_x(rows, 96)
        assert step(layer, x, NVFP4BlockScaling(), compiled) == step(layer, x, NVFP4BlockScaling())
    assert compiler.graphs == 1


def test_a_first_batch_of_the_size_of_kept_codes_fixes_nothing(recipe, compiler):
    layer = quire.LayerNormMLP(96, 160)
    with quire.autocast(recipe=recipe):
        quire.quantize_weights(layer)
        compiled = compiler(layer, dynamic=True)
        for rows in (160, 33, 96):
            x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
            assert torch.equal(compiled(x), layer(x))
    assert compiler.graphs == 1


def test_unmarked_batches_take_two_graphs(check, recipe, compiler):
    check(recipe, BATCHES, None)
    assert compiler.graphs == 2


def test_leading_dimensions_may_change_in_number_and_size(make_layer, make_x, step, recipe, compiler):
    layer = make_layer()
    compiled = compiler(layer, dynamic=True)
    for shape in [(96,), (5, 96), (4, 5, 96), (6, 3, 96), (2, 3, 4, 96)]:
        x = make_x(*shape)
        assert step(layer, x, recipe, compiled) == step(layer, x, recipe)
    assert compiler.graphs == 4  # one per rank


def test_an_empty_batch_has_zero_gradients(make_layer, make_x, step, recipe, compiler):
    layer, x = make_layer(), make_x(0, 96)
    done = step(layer, x, recipe, compiler(layer))
    assert done == step(layer, x, recipe)
    assert done.dx.shape == (0, 96) and not done.dw.any() and not done.db.any()


PROGRAM = """
import json, torch, quire
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Sequential(quire.Linear(64, 32), quire.Linear(32, 16))
compiled = torch.compile(model, fullgraph=True)
with quire.autocast(recipe=quire.recipe.from_name("nvfp4")):
    compiled(torch.ones(8, 64)).sum().backward()
names = ["autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass"]
print(json.dumps({"sum": model[0].weight.grad.sum().item(), **{n: counters["aot_autograd"][n] for n in names},
                  "fxgraph_cache_hit": counters["inductor"]["fxgraph_cache_hit"]}))
"""


@pytest.mark.slow
def test_a_second_process_finds_the_compiled_graphs_in_the_cache(with_one_cache):
    first, second = with_one_cache(PROGRAM), with_one_cache(PROGRAM)
    assert (first["autograd_cache_miss"], first["autograd_cache_hit"], first["autograd_cache_bypass"]) == (1, 0, 0)
    assert (second["autograd_cache_miss"], second["autograd_cache_hit"], second["fxgraph_cache_hit"]) == (0, 1, 2)
    assert first["sum"] == second["sum"]
