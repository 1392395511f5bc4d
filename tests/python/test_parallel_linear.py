"""Layers that are divided over two processes, compared with one process: every operand has its codes, so results are
equal but for sums over processes."""

import itertools

import pytest
import torch

from every_recipe import STATIC
from pairwise import each_value, pairwise
from parallel_layers import (
    KINDS,
    OPTIONS,
    RECIPES,
    WAYS,
    Case,
    calibrates_as_one_process,
    equals_one_process,
    infinities_reach_every_rank,
    refuses_exact,
)

DIVIDED = list(itertools.product(("column", "row"), (False, True)))
#: One for each way in which scales follow from a tensor, and for the random stream.
SOME = ("high_precision", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed")
NORMS = [kind for kind in KINDS if "Norm" in kind]


@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize("recipe", RECIPES)
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


@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "parts" in kind or "split" in kind])
@pytest.mark.parametrize("recipe", SOME)
def test_parts_of_the_outputs_are_divided_each_by_itself(two, recipe, kind, mode, sequence):
    if (mode, kind) == ("row", "Linear of parts"):
        pytest.skip("a row layer has all outputs")
    for tokens in ((64,), (14,)):
        two.run(equals_one_process, Case(recipe, kind, mode, sequence, tokens))


@pytest.mark.parametrize("options", [{"checkpoint": True}, {"delay_wgrad_compute": True}], ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_an_mlp_that_recomputes_or_defers(two, way, options):
    if (way, *options) == ("compiled", "delay_wgrad_compute"):
        pytest.skip("backward_dw() is no part of a graph")
    for recipe in ("mxfp8", "nvfp4", "delayed"):
        two.run(equals_one_process, Case(recipe, "LayerNormMLP", "column", True, options=options, way=way))


@pytest.mark.parametrize(
    ("recipe", "way", "divided"),
    [
        row
        for recipes in (SOME, [*STATIC])
        for row in pairwise(recipes, [way for way in WAYS if way != "eager"], DIVIDED)
    ],
)
def test_other_ways_to_run_a_layer(two, recipe, way, divided):
    mode, sequence = divided
    two.run(equals_one_process, Case(recipe, "Linear", mode, sequence, way=way))


@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
def test_options_of_the_layer(two, options, mode, sequence):
    for recipe in ("high_precision", "nvfp4", "mxfp8"):
        two.run(equals_one_process, Case(recipe, "Linear", mode, sequence, options=options))


# Not of column layers: a sum that differs in its last bit may be rounded to the next code.
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", [name for name in SOME if name != "high_precision"])
def test_a_gradient_of_x_that_is_rounded(two, recipe, sequence):
    two.run(equals_one_process, Case(recipe, "Linear", "row", sequence, call={"fp8_grad": True}))


@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(two, dtype, mode, sequence):
    for recipe in ("high_precision", "nvfp4", "mxfp8"):
        two.run(equals_one_process, Case(recipe, "Linear", mode, sequence, dtype=dtype))


@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize("kind", KINDS)
def test_all_results_are_those_of_one_process_within_exact(two, kind, mode, sequence):
    if mode == "row" and ("Norm" in kind or kind == "Linear of parts"):
        pytest.skip("these layers are divided by columns")
    for recipe, tokens in (("high_precision", (14,)), ("nvfp4", (64,)), ("fp8_current", (6, 5)), ("delayed", (0,))):
        two.run(equals_one_process, Case(recipe, kind, mode, sequence, tokens, way="exact"))


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_exact_refuses_gradients_outside_of_autograd(two, option):
    two.run(refuses_exact, Case("mxfp8", options={option: True}))


@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
def test_calibration_of_a_divided_layer_is_that_of_one_process(two, mode, sequence):
    two.run(calibrates_as_one_process, mode, sequence)


@pytest.mark.parametrize("recipe", ["fp8_current", "delayed", "static_fp8"])
def test_an_infinity_of_one_process_is_seen_by_all(two, recipe):
    two.run(infinities_reach_every_rank, recipe)
