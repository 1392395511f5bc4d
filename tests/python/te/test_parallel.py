"""Layers of quire.te sharded over processes: TransformerEngine's arguments mean what quire's own do."""

import contextlib

import pytest
import torch

import quire
from python.distributed.parallel_graphs import IN, OUT, TOKENS
from python.distributed.parallel_layers import equals_one_process
from python.te.parallel_ranks import (
    PARTS_BY_NAME,
    TeCase,
    drawn_by_a_tracker,
    group_of_one,
    group_that_comes_later,
    only_one_makes_a_layer,
)
from quire import te
from quire.distributed import Parallel
from ranks import rank_of
from steps import decoded

SHARDED = [(mode, sequence) for mode in ("column", "row") for sequence in (False, True)]
RECIPES = ("high_precision", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed")


@pytest.fixture
def group(device):
    with rank_of(0, 2, device.type) as group:
        yield group


@pytest.mark.parametrize(("mode", "sequence"), SHARDED)
@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_by_name_are_sharded_each_by_itself(two, recipe, mode, sequence):
    for tokens in ((64,), (14,)):
        two.run(equals_one_process, TeCase(recipe, PARTS_BY_NAME, mode, sequence, tokens))


@pytest.mark.parametrize(("mode", "sequence"), SHARDED)
def test_all_results_are_those_of_one_process_within_exact(two, mode, sequence):
    for recipe, tokens in (("high_precision", (14,)), ("nvfp4", (64,)), ("fp8_current", (6, 5)), ("delayed", (0,))):
        two.run(equals_one_process, TeCase(recipe, PARTS_BY_NAME, mode, sequence, tokens, way="exact"))


def test_a_group_of_one_process_does_not_change_a_bit(two):
    two.run(group_of_one)


def test_making_a_layer_does_not_wait_for_other_processes(two):
    assert two.run(only_one_makes_a_layer, deadline=30) == [True, True]


def test_weights_of_a_frameworks_stream_are_not_compared(two):
    assert [name for name, _, _ in two.run(drawn_by_a_tracker)] == ["", ""]


def test_a_layer_that_gets_its_group_later_does_not_have_the_weights_of_another(two):
    first, second = two.run(group_that_comes_later)
    for case, (drawn, state) in first.items():
        other, other_state = second[case]
        assert state == other_state
        for name, values in drawn.items():
            t, bound = torch.tensor(values), 1 / IN**0.5
            if t.dim() == 2:
                assert values != other[name] and 0.9 * bound < t.abs().max() <= bound, (case, name)
            else:
                assert values == other[name], (case, name)


def test_transformer_engines_arguments_mean_the_same(group):
    options = {"tp_group": group, "tp_size": 2}
    made = te.Linear(IN, OUT, parallel_mode="row", sequence_parallel=True, **options)
    assert made.parallel == Parallel("row", group, True) and made.weight.shape == (OUT, IN // 2)
    made.set_tensor_parallel_group(group)
    made = te.LayerNormLinear(IN, OUT, parallel_mode="column", **options)
    assert made.parallel == Parallel("column", group) and made.weight.shape == (OUT // 2, IN)
    made = te.LayerNormMLP(IN, OUT, set_parallel_mode=True, sequence_parallel=True, activation="swiglu", **options)
    assert made.fc1_parallel == Parallel("column", group, True, parts=(OUT, OUT)) and made.fc2_parallel == Parallel(
        "row", group, True
    )
    assert made.fc1_weight.shape == (OUT, IN) and made.fc2_weight.shape == (IN, OUT // 2)
    assert te.Linear(IN, OUT, **options).parallel is None  # parallel_mode=None: every process has the whole layer


def test_weights_are_drawn_from_the_stream_that_a_framework_names(group):
    names = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name):
            names.append(name)
            yield

    options = {"tp_group": group, "parallel_mode": "column", "get_rng_state_tracker": Tracker}
    te.Linear(IN, OUT, **options)
    te.Linear(IN, OUT, rng_tracker_name="own", **options)
    assert names == ["model-parallel-rng", "own"]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_the_weights_of_a_grouped_layer_are_sharded_as_by_transformer_engine(mode, recipe):
    splits, x = [16, 0, 48], torch.randn(TOKENS, IN)
    torch.manual_seed(3)
    whole = quire.GroupedLinear(3, IN, OUT, bias=False)
    parts = []
    for rank in range(2):
        with rank_of(rank, 2) as group:
            torch.manual_seed(3)
            parts.append(te.GroupedLinear(3, IN, OUT, tp_group=group, parallel_mode=mode, bias=False))
    for weights in zip(whole.parameters(), *(part.parameters() for part in parts), strict=True):
        assert torch.equal(weights[0], torch.cat(weights[1:], 0 if mode == "column" else 1))
    with quire.autocast(recipe=recipe):
        expected = whole(x, splits)
        xs = x.chunk(2, -1) if mode == "row" else (x, x)
        ys = [part(own, splits) for part, own in zip(parts, xs, strict=True)]
        # A part is a layer of its own weights, whose results are summed or put side by side elsewhere.
        for part, own, y in zip(parts, xs, ys, strict=True):
            sizes = next(iter(part.parameters())).shape
            alone = quire.GroupedLinear(3, sizes[1], sizes[0], bias=False)
            alone.load_state_dict(part.state_dict())
            assert torch.equal(alone(own, splits), y)
    if recipe == "mxfp8" and mode == "column":
        assert torch.equal(torch.cat(ys, -1), expected)
    elif recipe == "mxfp8":  # halves of a row have the blocks of the whole row: the codes are the same
        terms = [
            decoded(rows, "mxfp8:nan").abs() @ decoded(weight, "mxfp8:nan").abs().T
            for rows, weight in zip(x.split(splits), whole.parameters(), strict=True)
        ]
        # Two sums of the same terms in float32 (numerics.md 7.5), and the sum of two halves.
        assert ((sum(ys) - expected).double().abs() <= 2 * (IN + 7) * 2.0**-24 * torch.cat(terms)).all()


def test_a_sharded_grouped_layer_refuses_a_bias(group):
    with pytest.raises(NotImplementedError, match="added once for each rank; pass bias=False"):
        te.GroupedLinear(3, IN, OUT, tp_group=group, parallel_mode="row")


def test_transformer_engines_user_buffers_ask_for_a_ring(group):
    options = {"tp_group": group, "tp_size": 2, "sequence_parallel": True}
    made = te.Linear(IN, OUT, parallel_mode="row", ub_overlap_rs=True, ub_overlap_ag=True, ub_name="proj", **options)
    assert made.parallel == Parallel("row", group, True, overlap="ring")
    made = te.LayerNormLinear(IN, OUT, parallel_mode="column", ub_overlap_rs_dgrad=True, **options)
    assert made.parallel.overlap == "ring"
    made = te.LayerNormMLP(IN, OUT, set_parallel_mode=True, ub_overlap_ag=True, **options)
    assert made.fc1_parallel.overlap == made.fc2_parallel.overlap == "ring"
    made = te.Linear(IN, OUT, parallel_mode="row", ub_bulk_dgrad=True, ub_bulk_wgrad=True, **options)
    assert made.parallel.overlap is None
    with pytest.raises(NotImplementedError, match="ub_overlap_ag=True overlaps the exchange of tokens, and is not"):
        te.Linear(IN, OUT, parallel_mode="row", ub_overlap_ag=True, **options | {"sequence_parallel": False})
    with pytest.raises(TypeError, match="ub_overlap_ag must be a bool, got 2"):
        te.Linear(IN, OUT, parallel_mode="row", ub_overlap_ag=2, **options)
    with pytest.raises(NotImplementedError, match="ub_overlap_ag=True is not available.*sequence_parallel=True too"):
        te.Linear(IN, OUT, ub_overlap_ag=True)


def test_a_sharded_layer_of_several_parameters():
    with rank_of(1, 2) as group:
        parts = {"q": 32, "k": 16, "v": 16}
        for mode in ("column", "row"):
            torch.manual_seed(0)
            layer = te.Linear(64, 64, parallel=Parallel(mode, group), parameters_split=parts)
            state = quire.TrainingState(layer, torch.optim.AdamW(layer.parameters())).state_dict()
            for name, size in parts.items():
                found = state["model"][f"{name}_weight"], state["optimizer"]["state"][f"{name}_weight"]["exp_avg"]
                assert all(t.shape == (size, 64) for t in found)
                (piece,) = found[0].pieces
                assert piece.first == ((size // 2, 0) if mode == "column" else (0, 32))
            assert state["model"]["q_bias"].shape == (32,)
            assert all(torch.equal(t, layer.get_parameter(name)) for name, t in layer.state_dict().items())
        torch.nn.utils.parametrizations.weight_norm(layer, "q_weight")
        with pytest.raises(NotImplementedError, match="'q_weight' is this rank's shard of a weight and is parametriz"):
            quire.TrainingState(layer).state_dict()
