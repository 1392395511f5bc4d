"""Mixtures whose experts are sharded over a tp_group each, and over an ep_group too."""

import pytest
import torch

from every_recipe import STATIC, TABLE
from pairwise import each_value
from python.distributed.expert_tensor_ranks import (
    WAYS,
    Case,
    equals_one_process,
    graphs_of_the_mixture,
    infinite_biases_stay_infinite,
    loaded_by_one,
    says,
    scales_do_not_wait_for_the_end_of_a_step,
    states_travel,
)
from ranks import rank_of

#: One for each way in which scales follow from a tensor, for random bits, and for what backward multiplies.
SOME = ("high_precision", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed", "custom", "nvfp4_row_scaled")
OPTIONS = (
    {},
    {"bias": True},
    {"single_grouped_weight": True},
    {"shared_ffn_hidden_size": 256},
    {"weight_on_input": True, "activation": "clamped_swiglu"},
)
STACKED = OPTIONS.index({"single_grouped_weight": True})


@pytest.mark.parametrize("recipe", [*TABLE, *STATIC])
def test_gradients_of_sharded_experts_are_those_of_one_process(two, recipe):
    two.run(equals_one_process, Case(recipe))


def test_delayed_scales_follow_from_whole_operands_of_sharded_experts(two):
    two.run(scales_do_not_wait_for_the_end_of_a_step, Case("delayed"))


@pytest.mark.parametrize(
    ("recipe", "way", "option"),
    # The last: where weights are one parameter, those of all ranks do not come together along its first dimension.
    [*each_value(SOME, [way for way in WAYS if way != "eager"], range(len(OPTIONS))), ("mxfp8", "exact", STACKED)],
)
def test_other_ways_to_run_sharded_experts(two, recipe, way, option):
    two.run(equals_one_process, Case(recipe, options=OPTIONS[option], way=way))


@pytest.mark.parametrize("tokens", [1, 0, 130])
def test_numbers_of_tokens(two, tokens):
    for recipe in ("nvfp4", "mxfp8"):
        for way in ("eager", "exact"):
            two.run(equals_one_process, Case(recipe, (tokens,), dtype=torch.bfloat16, way=way))


@pytest.mark.parametrize("recipe", ["mxfp8", "high_precision"])
def test_infinite_biases_are_infinite_in_the_sum(two, recipe):
    two.run(infinite_biases_stay_infinite, Case(recipe, options={"bias": True}))


def test_a_mixture_is_one_graph(two):
    assert two.run(graphs_of_the_mixture, Case("nvfp4")) == [[2], [2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "ep", "way", "style"),
    each_value(
        ("nvfp4", "mxfp8", "delayed", "static_fp8"),
        ({}, {"capacity": 64}),
        ("eager", "compiled", "exact"),
        (False, True),
    ),
)
def test_experts_over_two_dimensions_of_a_mesh(four, recipe, ep, way, style):
    ep = ep if style else {f"ep_{name}": value for name, value in ep.items()}
    four.run(equals_one_process, Case(recipe, (13, 27), ep=ep, way=way, style=style))


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": True}, {"bias": True}], ids=str)
def test_training_states_of_parts_are_those_of_the_whole(two, options, tmp_path):
    case = Case("mxfp8", options=options)
    first, second = two.run(states_travel, case, str(tmp_path))
    with rank_of(0, 1):
        whole = loaded_by_one(case, str(tmp_path))
    for name, value in whole.items():
        if name.startswith("fc2.weight"):
            assert torch.equal(value, torch.cat([first[name], second[name]], -1)), name
        elif name.startswith("fc1"):
            axis = -1 if "bias" in name else -2
            halves = [
                torch.cat(half, axis)
                for half in zip(first[name].chunk(2, axis), second[name].chunk(2, axis), strict=True)
            ]
            assert torch.equal(value, torch.cat(halves, axis)), name
        elif name in first:
            assert torch.equal(value, first[name]) and torch.equal(value, second[name]), name


@pytest.mark.slow
def test_training_states_of_experts_over_two_dimensions(four, tmp_path):
    four.run(states_travel, Case("static_fp8", (13, 27)), str(tmp_path))


def test_what_does_not_go_with_a_tp_group_is_said_in_words(two):
    said = two.run(says)[0]
    assert "ep_dispatch='codes' does not go with a tp_group" in said["codes"]
    assert "leave single_grouped_weight and single_grouped_bias out" in said["stacked"]
    assert "each of the parts (63, 63) of the outputs must be a multiple of the 2 ranks" in said["sizes"]
    assert "groups of tokens are the same on all ranks" in said["sequence"]
    assert "out and dgrad_out are not available" in said["out"]
    assert "must be a plain parameter" in said["quantized"]
