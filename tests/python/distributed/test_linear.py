"""Layers that are sharded over two processes, compared with one process: every operand has its codes, so results are
equal but for sums over processes."""

import itertools

import pytest
import torch

from every_recipe import IN_ANY_PRECISION, STATIC
from pairwise import each_value, pairwise
from python.distributed.parallel_layers import (
    KINDS,
    OPTIONS,
    RECIPES,
    WAYS,
    Case,
    calibrates_as_one_process,
    equals_one_process,
    infinities_differ,
    refuses_exact,
)

SHARDED = list(itertools.product(("column", "row"), (False, True)))
#: One for each way in which scales follow from a tensor, and for the random stream.
SOME = ("high_precision", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed")
FEW = ("high_precision", "mxfp8", "nvfp4")
#: Of the others each mode runs once: their options are sharded as their defaults are.
OF_EVERY_SCALE = (*IN_ANY_PRECISION, *STATIC, "custom", "delayed_of_each_rank")
OTHER_WAYS = [way for way in WAYS if way != "eager"]
NORMS = [kind for kind in KINDS if "Norm" in kind]


@pytest.mark.parametrize(
    ("recipe", "mode", "sequence"),
    [
        (name, mode, sequence)
        for at, name in enumerate(RECIPES)
        for mode, sequence in SHARDED
        if name in OF_EVERY_SCALE or sequence == ((mode == "row") == (at % 2 == 0))
    ],
)
def test_results_are_those_of_one_process(two, recipe, mode, sequence):
    # Of two processes each: whole blocks, blocks that both share, one token, none, three dimensions.
    for tokens in ((256,), (14,), (2,), (0,), (6, 5)):
        two.run(equals_one_process, Case(recipe, "Linear", mode, sequence, tokens))


@pytest.mark.parametrize(
    ("recipe", "kind", "sequence"),
    [*itertools.product(SOME, NORMS, (False, True)), *each_value(list(STATIC), NORMS, (True, False, True))],
)
def test_layers_with_a_norm(two, recipe, kind, sequence):
    for tokens in ((64,), (14,)):
        two.run(equals_one_process, Case(recipe, kind, "column", sequence, tokens))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", SOME)
def test_parts_of_the_outputs_are_sharded_each_by_itself(two, recipe, sequence):
    for tokens in ((64,), (14,)):
        two.run(equals_one_process, Case(recipe, "Linear of parts", "column", sequence, tokens))


@pytest.mark.parametrize("options", [{"checkpoint": True}, {"delay_wgrad_compute": True}], ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_an_mlp_that_recomputes_or_defers(two, way, options):
    if (way, *options) == ("compiled", "delay_wgrad_compute"):
        pytest.skip("backward_dw() is no part of a graph")
    for recipe in ("mxfp8", "nvfp4", "delayed"):
        two.run(equals_one_process, Case(recipe, "LayerNormMLP", "column", True, options=options, way=way))


@pytest.mark.parametrize(
    ("recipe", "way", "sharded"),
    [*pairwise(SOME, OTHER_WAYS, SHARDED), *each_value([*STATIC], OTHER_WAYS, SHARDED)],
)
def test_other_ways_to_run_a_layer(two, recipe, way, sharded):
    two.run(equals_one_process, Case(recipe, "Linear", *sharded, way=way))


@pytest.mark.parametrize(("option", "sharded", "recipe"), pairwise(range(len(OPTIONS)), SHARDED, FEW))
def test_options_of_the_layer(two, option, sharded, recipe):
    two.run(equals_one_process, Case(recipe, "Linear", *sharded, options=OPTIONS[option]))


# Not of column layers: a sum that differs in its last bit may be rounded to the next code.
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", [name for name in SOME if name != "high_precision"])
def test_a_gradient_of_x_that_is_rounded(two, recipe, sequence):
    two.run(equals_one_process, Case(recipe, "Linear", "row", sequence, call={"fp8_grad": True}))


@pytest.mark.parametrize(("dtype", "sharded", "recipe"), pairwise((torch.bfloat16, torch.float16), SHARDED, FEW))
def test_dtypes(two, dtype, sharded, recipe):
    two.run(equals_one_process, Case(recipe, "Linear", *sharded, dtype=dtype))


@pytest.mark.parametrize(("mode", "sequence"), SHARDED)
@pytest.mark.parametrize("kind", KINDS)
def test_all_results_are_those_of_one_process_within_exact(two, kind, mode, sequence):
    if mode == "row" and ("Norm" in kind or kind == "Linear of parts"):
        pytest.skip("these layers are divided by columns")
    for recipe, tokens in (("high_precision", (14,)), ("nvfp4", (64,)), ("fp8_current", (6, 5)), ("delayed", (0,))):
        two.run(equals_one_process, Case(recipe, kind, mode, sequence, tokens, way="exact"))


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_exact_refuses_gradients_outside_of_autograd(two, option):
    two.run(refuses_exact, Case("mxfp8", options={option: True}))


@pytest.mark.parametrize(("mode", "sequence"), SHARDED)
def test_calibration_of_a_sharded_layer_is_that_of_one_process(two, mode, sequence):
    two.run(calibrates_as_one_process, mode, sequence)


#: A given scale is NaN only where the Inf is, until an amax comes from there (numerics.md 6.10).
OF_ONE_RANK = {
    "fp8_current": set(),
    "static_fp8": {("row", "x", "weight")},
    "delayed": {("row", "x", "weight"), ("column", "weight", "y"), ("row", "weight", "dx")},
}


@pytest.mark.parametrize("overlap", [None, "ring"])
@pytest.mark.parametrize("recipe", OF_ONE_RANK)
def test_an_infinity_of_one_process_is_seen_by_all(two, recipe, overlap):
    pieces = {("column", "x", "y")} if overlap and recipe != "fp8_current" else set()
    assert two.run(infinities_differ, recipe, overlap) == [OF_ONE_RANK[recipe] | pieces, pieces]
