"""Ranks that end, hang or differ: every other rank raises an error that says where, within the timeout of the group."""

import re

import pytest

from python.distributed.failing_ranks import (
    SHORT,
    agreed_before,
    alike_sizes,
    apart,
    checked,
    compiled,
    compiled_layouts,
    compiled_sizes,
    interrupted,
    other_rank_in_backward,
    other_rank_in_forward,
    paths,
    seeds_differ,
    states_differ,
)
from ranks import PATIENCE


def of_rank_0(ranks, function, *arguments):
    (well, answer), _ = ranks.outcomes(function, *arguments)
    assert well, answer
    name, text, seconds = answer
    assert seconds < SHORT + 3
    return name, text


# Which layer has the first collective: the amaxes of a sharded weight, the codes of sharded tokens, a sum.
@pytest.mark.parametrize(
    ("recipe", "sequence", "act", "layer", "collective"),
    [
        ("fp8_current", False, "ends", "'up', column", "all_reduce"),
        ("mxfp8", True, "hangs", "'up', column", "all_gather"),
        ("mxfp8", False, "ends", "'down', row", "all_reduce"),
    ],
)
def test_the_error_of_a_forward_pass_names_layer_mode_rank_and_collective(
    new, recipe, sequence, act, layer, collective
):
    name, text = of_rank_0(new, other_rank_in_forward, recipe, sequence, act)
    assert name == "DistBackendError"
    assert f"quire.Linear {layer}, rank 0 of 2: {collective} over the 2 ranks of 'quire:tp' failed" in text
    assert "QUIRE_CHECK_RANKS=1" in text and "🏖" not in text


@pytest.mark.parametrize(("sequence", "act"), [(False, "hangs"), (True, "ends")])
def test_the_error_of_a_backward_pass_names_them_too(new, sequence, act):
    name, text = of_rank_0(new, other_rank_in_backward, sequence, act)
    where = "'down', row" if sequence else "'up', column"  # the first that has a collective
    assert name == "DistBackendError", text
    assert f"quire.Linear {where}, rank 0 of 2: all_reduce over the 2 ranks of 'quire:tp' failed" in text


@pytest.mark.slow
def test_the_line_of_compiled_code_that_failed_leads_to_the_layer(new):
    (well, answer), _ = new.outcomes(compiled)
    assert well, answer
    forward, backward, log = answer
    for error, _ in (forward, backward):
        assert "quire.Linear" not in error, "it names the layer now: docs/distributed.md says that it does not"
    assert "Nodes: [parallel_linear_1], Original ATen: [_c10d_functional.wait_tensor]" in forward[1][-1]
    (line,) = [line for line in log.splitlines() if "parallel_linear_1 = torch" in line]
    assert "modules_down_parameters_weight_" in line
    assert backward[1][-1].startswith("# Topologically Sorted Source Nodes: [wait_tensor")
    *_, nearest = [line for line in backward[1] if "Nodes: [linear_dgrad" in line]
    assert "Nodes: [linear_dgrad_1]," in nearest, "the layer before the last, which is 'up'"


def test_an_interruption_stays_one(new):
    # It never becomes another error. PyTorch may drop it, if Python raises it within a callback of its own.
    raised = []
    while "KeyboardInterrupt" not in raised and len(raised) < 5:
        (well, name), _ = new.outcomes(interrupted)
        assert well and name in ("KeyboardInterrupt", "")
        raised.append(name)
    assert raised[-1] == "KeyboardInterrupt"


def test_a_copy_of_a_layer_has_the_path_of_its_own_model(two):
    assert two.run(paths) == [("up", "0.up", "", None)] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "shape",
            "differ in tokens: 32 on rank 0 of the group, 48 on rank 1 of the group; x: ",
        ),
        ("recipe", "differ in recipe x: fp8_tensor:nan on rank 0 of the group, mxfp8:nan on rank 1 of the group; rec"),
        ("layer", "differ in layer: quire.Linear 'up' on rank 0 of the group, quire.Linear 'down' on rank 1 of the"),
        ("scale", "differ in input_scale: [0.00499"),
    ],
)
def test_ranks_that_differ_are_told_apart_before_a_collective(two, change, said):
    for name, text, seconds in two.run(checked, change):
        assert name == "RuntimeError" and "QUIRE_CHECK_RANKS=1" in text and seconds < SHORT
        assert "must make the same calls" in text and len(text) < 600
        assert said in text and "weight:" not in text, text


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sequence", "tokens: 32 on rank 0 of the group, 48 on rank 1 of the group"),
        ("tokens", "tokens: 32 on rank 0 of the group, 48 on rank 1 of the group"),
        ("recipe", "recipe x: mxfp8:nan on rank 0 of the group, nvfp4:rht:nan on rank 1 of the group"),
        ("capacity", "capacity: 8 on rank 0 of the group, 9 on rank 1 of the group"),
        ("features", "tokens: torch.float32 [*, 64] on rank 0 of the group, torch.float32 [*, 96] on rank 1"),
        ("delayed", "states: 4 on rank 0 of the group, 2 on rank 1 of the group"),
        (
            "shard_weights",
            "parameter 0.weight: torch.float32 [64, 128] on rank 0 of the group, torch.float32 [96, 128]",
        ),
        ("rows", "recipe x: mxfp8:nan on rank 0 of the group, nvfp4"),
        ("gather_codes", "recipe w: mxfp8:nan on rank 0 of the group, nvfp4"),
        ("exact", "tokens: 32 on rank 0 of the group, 48 on rank 1 of the group"),
    ],
    ids=lambda text: text.partition(":")[0],
)
def test_no_difference_of_sizes_ends_a_process(new, kind, said):
    """Each rank raises an error with both values, although QUIRE_CHECK_RANKS is not set."""
    for well, answer in new.outcomes(alike_sizes, kind):
        assert well, answer
        name, text, seconds = answer
        assert name == "RuntimeError" and said in text and seconds < SHORT + 20, text


SEQUENCE, RING = {"sequence": True}, {"sequence": True, "overlap": "ring"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "options", "recipe", "backend"),
    [
        ("column+row", SEQUENCE, "mxfp8", "aot_eager"),
        ("column", SEQUENCE, None, "inductor"),  # values are gathered
        ("column", RING, "nvfp4", "aot_eager"),
        ("column", {}, "mxfp8", "aot_eager"),  # the first collective that tokens change is one of backward
        ("row", {}, "x=fp8_row,w=fp8_row,dy=fp8_row", "aot_eager"),  # it is the reduction of one amax for each token
        ("row", SEQUENCE, "mxfp8", "aot_eager"),
        ("row", RING, "mxfp8", "aot_eager"),
    ],
)
def test_no_number_of_tokens_ends_a_process_that_runs_compiled_code(two, parts, options, recipe, backend):
    for rank, calls in enumerate(two.run(compiled_sizes, parts, options, recipe, backend)):
        first, *alike, later, again, alone = calls
        for (name, text, seconds), other in ((first, 64), (later, 96)):
            assert name == "RuntimeError" and seconds < PATIENCE, text
            assert "compiled function" in text and f"rank {rank} of 2" in text
            assert f"differ in tokens: 32 on rank 0 of the group, {other} on rank 1 of the group. They" in text
        assert [name for name, _, _ in (*alike, again)] == [""] * 4, calls
        assert alone[0] == "RuntimeError" and alone[2] < SHORT + 20, alone
        assert rank == 0 or "it still has the sizes of its last call. The call here: " in alone[1], alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way", "said"),
    [
        ("capacity", "export", "capacity: 8 on rank 0 of the group, 72 on rank 1"),
        (
            "features",
            "aot_eager",
            "tokens: torch.float32 [*, 64] on rank 0 of the group, torch.float32 [*, 96] on rank",
        ),
        ("experts", "aot_eager", ", 4 experts on rank 0 of the group, quire:ep"),
        ("dispatch", "aot_eager", "dispatch: values on rank 0 of the group, codes on rank 1"),
        ("codes", "inductor", "recipe w: mxfp8:nan on rank 0 of the group, nvfp4:16x16:nan on rank 1"),
        ("amaxes", "aot_eager", "recipe w: fp8_tensor:nan on rank 0 of the group, fp8_row"),
        ("values", "aot_eager", "shard of the weight: torch.float32 [32, 128] on rank 0 of the group, torch.bfloat16"),
    ],
)
def test_no_constant_of_a_graph_ends_a_process(two, kind, way, said):
    for rank, ((name, text, seconds), *alike) in enumerate(two.run(compiled_layouts, kind, way)):
        assert name == "RuntimeError" and seconds < PATIENCE, text
        assert "of a compiled function" in text and f"rank {rank} of 2" in text and said in text, text
        assert [name for name, _, _ in alike] == [""] * 2, alike


@pytest.mark.parametrize("kind", ["later", "earlier"])
def test_a_rank_that_alone_has_other_sizes_than_before_says_so(new, kind):
    """The other is in its collective then, and waits as for a rank that does not come."""
    (well, alone), (also_well, other) = new.outcomes(alike_sizes, kind)[:: 1 if kind == "earlier" else -1]
    assert well and also_well, (alone, other)
    assert alone[0] == "RuntimeError" and "it still has the sizes of its last call" in alone[1], alone
    assert "tokens 48" in alone[1]
    assert other[0] == "DistBackendError" and "quire.Linear" in other[1], other


def test_sizes_that_all_ranks_had_before_are_compared_again_when_one_rank_alone_has_them(two):
    (other, _, _), (name, text, _) = two.run(agreed_before)
    assert other == "" and name == "RuntimeError" and "it still has the sizes of its last call" in text, text


def test_ranks_that_are_apart_do_not_take_what_was_said_then_for_what_is_said_now(two):
    (first, again), (_, other) = two.run(apart)
    assert first[0] == "RuntimeError" and "rank 1 of the group did not come to this call" in first[1]
    assert again[0] == "RuntimeError" and "no longer make the same calls" in again[1] and again[2] < 1
    assert other[0] == "RuntimeError" and "rank 0 of the group did not come to this call" in other[1]


def test_ranks_that_ran_different_layers_with_delayed_scaling_are_told_apart(two):
    for name, text, seconds in two.run(states_differ):
        assert name == "RuntimeError" and seconds < SHORT, text
        assert "states: 4 on rank 0 of the group, 2 on rank 1 of the group" in text


def test_a_rank_that_does_not_come_is_named(two):
    (name, text, seconds), _ = two.run(checked, "stays away")
    assert name == "RuntimeError" and seconds < SHORT + 2
    assert "rank 1 of the group did not come to this call within 3 seconds" in text and "'up'" in text


def test_ranks_that_agree_get_their_results(two):
    assert [name for name, _, _ in two.run(checked, "nothing")] == ["", ""]


@pytest.mark.parametrize(("kind", "layer"), [("layers", "quire.Linear 'up'"), ("experts", "quire.MoE")])
def test_ranks_that_drew_different_weights_are_told_apart(two, kind, layer):
    for name, text, seconds in two.run(seeds_differ, kind, "nothing"):
        assert name == "RuntimeError" and seconds < SHORT, text
        assert text.startswith(layer) and "call torch.manual_seed with one seed" in text
        drawn = re.search(r"differ in weight drawn as: (.*) on rank 0 of the group, (.*) on rank 1 of", text)
        assert drawn[1] != drawn[2] and drawn[1].count(",") == drawn[2].count(",") == 3
    assert [name for name, _, _ in two.run(seeds_differ, kind, "one seed")] == ["", ""]


@pytest.mark.parametrize("kind", ["layers", "experts"])
def test_weights_that_are_not_those_of_a_seed_are_not_compared(two, kind):
    assert [name for name, _, _ in two.run(seeds_differ, kind, "loaded")] == ["", ""]
