"""Mixtures whose experts are divided over processes, compared with one process: results are equal."""

import copy
import pickle

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import distributed
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import quire
from every_recipe import IN_ANY_PRECISION, TABLE
from expert_ranks import (
    WAYS,
    Case,
    differs,
    divided_by_style,
    drops,
    equals_one_process,
    equals_without_gradients,
    graphs_of_steps,
    loaded_by_one,
    of_size_one,
    other_rank,
    overflow,
    rows_travel,
    saved_by_both,
    states,
)
from failing_ranks import SHORT
from quire.distributed import ExpertParallel, name_group
from ranks import Ranks, rank_of

SIZES = {"exact": {}, "capacity": {"ep_capacity": 64}}


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture
def new():
    """For one test, which leaves them in a collective."""
    ranks = Ranks(2)
    yield ranks
    ranks.kill()


@pytest.fixture
def four():
    ranks = Ranks(4)
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_loads_a_distributed_checkpoint_of_two(two, tmp_path):
    parts = two.run(saved_by_both, str(tmp_path))
    state, trained = loaded_by_one(str(tmp_path))
    assert parts[0].keys() | parts[1].keys() == state.keys() and all(trained)
    for part in parts:
        for name, value in part.items():
            assert name == "router.weight" or torch.equal(state[name], value), name


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_every_process_raises_where_one_has_too_many_rows(two, way):
    for said in two.run(overflow, way):
        assert "a process has more than ep_capacity=8 rows for one of the 2 processes of 'quire:ep" in said
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
    assert "quire.MoE 'mixture', rank 0 of 2: all_to_all over the 2 processes of 'quire:ep' failed" in text
    assert "QUIRE_CHECK_RANKS=1" in text


def test_processes_that_differ_are_told_apart(two):
    for name, text, _ in two.run(differs, True):
        assert name == "RuntimeError" and "x=fp8_tensor" in text and "x=mxfp8" in text and "'mixture'" in text
    assert [name for name, _, _ in two.run(differs, False)] == ["", ""]


# ---------------------------------------------------------------- in one process


@pytest.fixture
def group():
    with rank_of(0, 2) as group:
        yield group


class Traced(Exception):
    """Ends a call when its graphs are there: PyTorch's fake group gives no numbers of rows."""


def graphs(layer, x):
    """The forward and the backward graph."""
    found = []

    def keep(*arguments, **options):
        found.extend(min_cut_rematerialization_partition(*arguments, **options))
        return found

    def stop(graph, inputs):
        raise Traced

    compilers = dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), stop)
    backend = aot_autograd(**compilers, partition_fn=keep)
    with pytest.raises(Exception, match="Traced"), quire.autocast(recipe="nvfp4"):
        torch.compile(layer, fullgraph=True, backend=backend)(x)
    return found


@pytest.mark.parametrize("sizes", SIZES)
def test_graphs_are_the_same_text_on_every_rank(sizes):
    texts = []
    for rank in (0, 1, 63):
        with rank_of(rank, 64) as world:
            others = distributed.new_group([(rank + i) % 64 for i in range(2)])  # of another name on each rank
            del others
            layer = quire.MoE(32, 32, 64, ep_group=world, **SIZES[sizes])
            texts.append([str(graph.code) for graph in graphs(layer, torch.randn(5, 32, requires_grad=True))])
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 2


def operators(graph):
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith(("quire", "_c10d"))]


@pytest.mark.parametrize("sizes", SIZES)
def test_shared_experts_compute_while_rows_travel(group, sizes):
    layer = quire.MoE(32, 32, 4, ep_group=group, shared_ffn_hidden_size=32, **SIZES[sizes])
    forward, backward = map(operators, graphs(layer, torch.randn(5, 32, requires_grad=True)))
    begin = forward.index("permute_fwd") + 1
    shared = ["linear_fwd", "activation_fwd", "linear_fwd"]
    assert forward[begin : begin + 5] == ["all_to_all_single", *shared, "wait_tensor"]
    assert forward.count("all_to_all_single") == 3 and backward.count("all_to_all_single") == 2


@pytest.mark.parametrize("sizes", SIZES)
def test_an_exported_program(group, sizes):
    layer = quire.MoE(32, 32, 4, ep_group=name_group(group, "experts"), **SIZES[sizes])
    with torch.no_grad(), quire.autocast(recipe="mxfp8"):
        program = torch.export.export(layer, (torch.randn(8, 32),))
    assert operators(program.graph_module).count("all_to_all_single") == 3
    assert "experts" in str(program.graph)


def test_copies_pickles_moves_and_the_meta_device(group):
    layer = quire.MoE(32, 32, 4, ep_group=group)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.expert_group == layer.expert_group and copied.state_dict().keys() == layer.state_dict().keys()
    assert "ep_group='quire:ep'" in repr(layer) and "own=range(0, 2)" in repr(layer)
    meta = quire.MoE(32, 32, 4, ep_group=group, device="meta")
    assert [name for name, _ in meta.fc1.named_parameters()] == ["weight0", "weight1"]
    assert meta(torch.empty(3, 32, device="meta")).shape == (3, 32)
    meta.to_empty(device="cpu")
    meta.load_state_dict(layer.state_dict())
    torch.manual_seed(0)
    first, torch_seed = quire.MoE(32, 32, 4, ep_group=group), torch.manual_seed(0)
    del torch_seed
    assert torch.equal(first.fc2.weight1, quire.MoE(32, 32, 4).fc2.weight1)
    with quire.quantized_model_init(recipe="mxfp8"):
        quantized = quire.MoE(32, 32, 4, ep_group=group)
    assert isinstance(quantized.fc1.weight0, quire.QuantizedTensor) and not hasattr(quantized.fc1, "weight2")


def test_random_streams_are_those_of_one_process():
    seeds = []
    for rank in (0, 1):
        with rank_of(rank, 2) as group:
            torch.manual_seed(0)
            layer = quire.MoE(32, 32, 6, ep_group=group)
            assert layer.fc1.sr_state[0] - quire.rng_state(layer)["fc1"][0] == 3 * rank
            seeds.append({name: state.tolist() for name, state in quire.rng_state(layer).items()})
            quire.set_rng_state(layer, {name: torch.tensor([5, 1]) for name in seeds[0]})
            assert layer.fc2.sr_state.tolist() == [5 + 3 * rank, 1]
    torch.manual_seed(0)
    alone = {name: state.tolist() for name, state in quire.rng_state(quire.MoE(32, 32, 6)).items()}
    assert seeds[0] == seeds[1] == alone


def test_what_is_refused(group):
    with pytest.raises(
        ValueError, match="the number of experts, 5, must be a multiple of the 2 processes of 'quire:ep'"
    ):
        quire.MoE(32, 32, 5, ep_group=group)
    with pytest.raises(ValueError, match="no process group is named 'nowhere'; pass the group, or name it"):
        quire.MoE(32, 32, 4, ep_group="nowhere")
    with pytest.raises(TypeError, match="group must be a process group"):
        quire.MoE(32, 32, 4, ep_group=3)
    with pytest.raises(ValueError, match="ep_capacity must be at least 1, and goes with an ep_group; got 0 with one"):
        quire.MoE(32, 32, 4, ep_group=group, ep_capacity=0)
    with pytest.raises(ValueError, match="got 8 without one"):
        quire.MoE(32, 32, 4, ep_capacity=8)
    with pytest.raises(ValueError, match="ep_overflow must be 'raise' or 'drop', got 'ignore'"):
        quire.MoE(32, 32, 4, ep_group=group, ep_overflow="ignore")
    mesh, layer = init_device_mesh("cpu", (2,)), quire.MoE(32, 32, 4)
    with pytest.raises(NotImplementedError, match="ExpertParallel of a Linear: only a quire.MoE has experts"):
        parallelize_module(quire.Linear(32, 32), mesh, ExpertParallel())
    with pytest.raises(ValueError, match="number of experts, 3, must be a multiple"):
        parallelize_module(quire.MoE(32, 32, 3), mesh, ExpertParallel())
    with pytest.raises(ValueError, match="device_mesh must have one dimension, such as mesh.'ep'."):
        parallelize_module(layer, init_device_mesh("cpu", (1, 2)), ExpertParallel())
    with (
        quire.quantized_model_init(recipe="mxfp8"),
        pytest.raises(NotImplementedError, match="weight0 must be a plain"),
    ):
        parallelize_module(quire.MoE(32, 32, 4), mesh, ExpertParallel())
    parallelize_module(layer, mesh, ExpertParallel())
    with pytest.raises(ValueError, match="its experts are divided over processes already"):
        parallelize_module(layer, mesh, ExpertParallel())
    with pytest.raises(NotImplementedError, match=r"x is a DTensor with .* pass this process's tokens, x.to_local\(\)"):
        layer(distribute_tensor(torch.randn(4, 32), mesh, [Shard(0)]))
