"""Mixtures whose experts are divided over processes, compared with one process: results are equal."""

import pytest
import torch

from every_recipe import IN_ANY_PRECISION, TABLE
from expert_ranks import (
    WAYS,
    Case,
    divided_by_style,
    equals_one_process,
    equals_without_gradients,
    graphs_of_steps,
    rows_travel,
    states,
)
from ranks import Ranks

SIZES = {"exact": {}, "capacity": {"ep_capacity": 64}}


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", TABLE)
def test_results_are_those_of_one_process(two, recipe, sizes):
    two.run(equals_one_process, Case(recipe, ep=SIZES[sizes]))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", ["high_precision", "fp8_current", "nvfp4", "delayed"])
def test_processes_without_tokens_and_experts_without_rows(two, recipe, sizes):
    for tokens, to in (((0, 20), ()), ((9, 0), ()), ((0, 0), ()), ((13, 27), (3,)), ((13, 27), (1, 0))):
        two.run(equals_one_process, Case(recipe, tokens, to=to, ep=SIZES[sizes]))


OPTIONS = [
    {"bias": True},
    {"bias": True, "single_grouped_weight": True},
    {"weight_on_input": True},
    {"activation": "gelu", "top_k": 1},
    {"activation": "clamped_swiglu", "top_k": 4},
    {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    {"shared_ffn_hidden_size": 32},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
def test_options_of_the_mixture(two, options):
    for recipe in ("high_precision", "mxfp8"):
        for dtype in (torch.float32, torch.bfloat16):
            two.run(equals_one_process, Case(recipe, options=options, dtype=dtype))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "eager"])
@pytest.mark.parametrize("sizes", SIZES)
def test_ways_to_run(two, way, sizes):
    for recipe in ("mxfp8", "nvfp4", "delayed"):
        two.run(equals_one_process, Case(recipe, ep=SIZES[sizes], way=way))


@pytest.mark.parametrize("recipe", IN_ANY_PRECISION)
def test_without_gradients(two, recipe):
    two.run(equals_without_gradients, Case(recipe))


@pytest.mark.parametrize("capacity", [None, 12])
def test_rows_arrive_in_the_order_of_all_tokens_and_come_back(two, capacity):
    some = torch.tensor([[3, 3], [-1, 0], [2, 1], [0, -1]], dtype=torch.int32)  # one expert twice, and none
    others = torch.tensor([[1, 3], [3, 2], [-1, -1]], dtype=torch.int32)
    for ids in ((some, others), (some, others[:0]), (some[:0], others[:0]), (others, some)):
        two.run(rows_travel, ids, capacity)


@pytest.mark.parametrize("sizes", SIZES)
def test_one_graph_serves_all_numbers_of_tokens_on_every_rank(two, sizes):
    assert two.run(graphs_of_steps, "mxfp8", SIZES[sizes], "aot_eager") == [1, 1]


@pytest.mark.slow
def test_one_graph_of_inductor_serves_them_too(two):
    assert two.run(graphs_of_steps, "nvfp4", {}, "inductor") == [1, 1]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_style_divides_a_mixture(two, single, way):
    for recipe in ("high_precision", "nvfp4", "delayed") if way == "eager" else ("nvfp4",):
        case = Case(recipe, options={"bias": False, "single_grouped_weight": single}, way=way)
        (names, kinds), (others, _) = two.run(divided_by_style, case)
    assert names == (
        ["router.weight", "fc1.weight", "fc2.weight"]
        if single
        else ["router.weight", "fc1.weight0", "fc1.weight1", "fc2.weight0", "fc2.weight1"]
    )
    assert kinds == ["Parameter"] + ["DTensor"] * 2 if single else set(kinds) == {"Parameter"}
    assert (others == names) is single


@pytest.mark.parametrize("single", [False, True])
def test_state_dicts_of_processes_and_of_one_fit_together(two, single):
    (whole, first), (_, second) = two.run(states, single)
    if not single:
        assert first | second == whole and first & second == {"router.weight"}
