"""Mixtures whose experts are sharded over processes, compared with one process: results are equal."""

import pytest
import torch

from every_recipe import IN_ANY_PRECISION, TABLE
from pairwise import pairwise
from python.distributed.expert_limits import (
    codes_are_sent,
    differs,
    drops,
    frozen_experts,
    of_size_one,
    other_rank,
    overflow,
)
from python.distributed.expert_ranks import (
    WAYS,
    Case,
    equals_one_process,
    equals_without_gradients,
    graphs_of_steps,
    loaded_by_one,
    rows_travel,
    saved_by_both,
    sharded_by_style,
    stacks_loaded_by_one,
    stacks_saved_by_both,
    states,
)
from python.distributed.failing_ranks import SHORT

SIZES = {"exact": {}, "capacity": {"ep_capacity": 64}}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", [*TABLE, "static_fp8"])
def test_results_are_those_of_one_process(two, recipe, sizes):
    two.run(equals_one_process, Case(recipe, ep=SIZES[sizes]))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", ["high_precision", "fp8_current", "nvfp4", "delayed"])
def test_processes_without_tokens_and_experts_without_rows(two, recipe, sizes):
    for tokens, to in (((0, 20), ()), ((9, 0), ()), ((0, 0), ()), ((13, 27), (3,)), ((13, 27), (1, 0))):
        two.run(equals_one_process, Case(recipe, tokens, to=to, ep=SIZES[sizes]))


@pytest.mark.slow
def test_four_processes(four):
    for recipe in ("mxfp8", "nvfp4"):
        for ep in SIZES.values():
            four.run(equals_one_process, Case(recipe, (9, 0, 31, 6), ep=ep))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_group_of_one_process(two, sizes):
    for recipe in ("nvfp4", "delayed"):
        two.run(of_size_one, Case(recipe, (11, 13), ep=SIZES[sizes]))


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


@pytest.mark.parametrize(
    ("recipe", "way", "sizes"),
    pairwise(("mxfp8", "nvfp4", "delayed"), [way for way in WAYS if way != "eager"], list(SIZES)),
)
def test_ways_to_run(two, recipe, way, sizes):
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


@pytest.mark.parametrize(
    ("recipe", "dtype", "bits"),
    [
        ("mxfp8", torch.float32, 8 + 8 / 32),
        ("mxfp8_dequantized", torch.bfloat16, 8 + 8 / 32),
        ("mxfp4", torch.bfloat16, 4 + 8 / 32),
        ("fp8_block", torch.bfloat16, 8 + 32 / 64),  # of a block of 128, half of which there is
        ("nvfp4_row_scaled", torch.bfloat16, 4 + 8 / 16 + 32 / 64),
        ("custom", torch.float32, 8 + 32 / 64),
        ("high_precision", torch.float32, 32),
    ],
)
def test_rows_travel_as_codes(two, recipe, dtype, bits):
    for values, codes in two.run(codes_are_sent, recipe, dtype):
        assert codes == values * bits / torch.finfo(dtype).bits


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_training_of_rows_that_travel_as_codes(two, way):
    for ep in SIZES.values():
        two.run(equals_one_process, Case("mxfp8_dequantized", ep=ep | {"ep_dispatch": "codes"}, way=way))


def test_experts_that_are_not_trained_take_codes_under_other_recipes_too(two):
    for recipe in ("mxfp8", "fp8_block", "nvfp4_row_scaled"):
        two.run(frozen_experts, recipe)


@pytest.mark.parametrize("sizes", SIZES)
def test_one_graph_serves_all_numbers_of_tokens_on_every_rank(two, sizes):
    assert two.run(graphs_of_steps, "mxfp8", SIZES[sizes], "aot_eager") == [1, 1]


@pytest.mark.slow
def test_one_graph_of_inductor_serves_them_too(two):
    assert two.run(graphs_of_steps, "nvfp4", {}, "inductor") == [1, 1]


@pytest.mark.parametrize(("single", "way"), [(False, "eager"), (True, "eager"), (True, "compiled")])
def test_a_style_divides_a_mixture(two, single, way):
    for recipe in ("high_precision", "nvfp4", "delayed", "static_nvfp4") if way == "eager" else ("nvfp4",):
        case = Case(recipe, options={"bias": False, "single_grouped_weight": single}, way=way)
        (names, kinds), (others, _) = two.run(sharded_by_style, case)
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
        both = {"router.weight", "fc1.input_scale", "fc2.input_scale"}
        assert first | second == whole and first & second == both


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_loads_a_distributed_checkpoint_of_two(two, tmp_path):
    parts = two.run(saved_by_both, str(tmp_path))
    state, trained = loaded_by_one(str(tmp_path))
    assert parts[0].keys() | parts[1].keys() == state.keys() and all(trained)
    for part in parts:
        for name, value in part.items():
            assert name == "router.weight" or torch.equal(state[name], value), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_loads_stacks_of_experts_of_two(two, tmp_path):
    parts = two.run(stacks_saved_by_both, str(tmp_path / "saved"))
    state, trained = stacks_loaded_by_one(str(tmp_path / "saved"))
    assert all(trained)
    for name in ("fc1.weight", "fc2.weight", "fc1.input_scale", "fc2.input_scale"):
        assert torch.equal(state[name], torch.cat([part[name] for part in parts])), name


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_every_process_raises_where_one_has_too_many_rows(two, way):
    for said in two.run(overflow, way):
        assert "a rank has more than ep_capacity=8 rows for one of the 2 ranks of 'quire:ep" in said
        assert "ep_overflow='drop'" in said


def test_rows_that_exceed_the_capacity_are_dropped(two):
    assert two.run(drops, 64) == [0, 0]
    first, second = two.run(drops, 8)
    assert first > second > 0


@pytest.mark.parametrize(("where", "act"), [("forward", "hangs"), ("forward", "ends"), ("backward", "ends")])
def test_the_error_of_a_collective_names_the_mixture(new, where, act):
    (well, answer), _ = new.outcomes(other_rank, where, act)
    name, text, seconds = answer
    assert well and name == "DistBackendError" and seconds < SHORT + 3
    assert "quire.MoE 'mixture', rank 0 of 2: all_to_all over the 2 ranks of 'quire:ep' failed" in text
    assert "QUIRE_CHECK_RANKS=1" in text


def test_processes_that_differ_are_told_apart(two):
    for name, text, _ in two.run(differs, True):
        assert name == "RuntimeError" and "'mixture'" in text
        assert "recipe x: fp8_tensor:nan on rank 0 of the group, mxfp8:nan on rank 1 of the group" in text
    assert [name for name, _, _ in two.run(differs, False)] == ["", ""]
