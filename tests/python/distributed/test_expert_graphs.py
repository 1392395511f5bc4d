"""Mixtures whose experts are sharded over processes, in one process: graphs of ranks, states, and what is refused."""

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
from every_recipe import TABLE
from quire.distributed import ExpertParallel, name_group
from quire.distributed.experts import pack, unpack
from ranks import rank_of

pytestmark = pytest.mark.any_device

SIZES = {"exact": {}, "capacity": {"ep_capacity": 64}}


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


# With exact numbers a graph has sizes for each process, which take long to trace.
@pytest.mark.parametrize(("sizes", "processes"), [("exact", 8), ("capacity", 64)])
def test_graphs_are_the_same_text_on_every_rank(sizes, processes, device):
    texts = []
    for rank in (0, 1, processes - 1):
        with rank_of(rank, processes, device.type) as world:
            others = distributed.new_group([(rank + i) % processes for i in range(2)])  # of another name on each rank
            del others
            layer = quire.MoE(32, 32, 64, ep_group=world, **SIZES[sizes]).to(device)
            x = torch.randn(5, 32).to(device).requires_grad_()
            texts.append([str(graph.code) for graph in graphs(layer, x)])
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
    grouped = quire.GroupedLinear(4, 32, 16, ep_group="quire:ep")
    assert grouped(torch.randn(6, 32), [4, 2]).shape == (6, 16)
    with pytest.raises(RuntimeError, match="one size for each of the 2 groups"):
        grouped(torch.randn(6, 32), [4, 2, 0, 0])
    meta = quire.MoE(32, 32, 4, ep_group=group, device="meta")
    assert [name for name, _ in meta.fc1.named_parameters()] == ["weight0", "weight1"]
    assert meta(torch.empty(3, 32, device="meta")).shape == (3, 32)
    meta.to_empty(device="cpu")
    meta.load_state_dict(layer.state_dict())
    torch.manual_seed(0)
    first = quire.MoE(32, 32, 4, ep_group=group)
    torch.manual_seed(0)
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


@pytest.mark.cpu_only
def test_what_is_refused(group):
    with pytest.raises(ValueError, match="the number of experts, 5, must be a multiple of the 2 ranks of 'quire:ep'"):
        quire.MoE(32, 32, 5, ep_group=group)
    with pytest.raises(ValueError, match="no process group is named 'nowhere'; pass the group, or name it"):
        quire.MoE(32, 32, 4, ep_group="nowhere")
    with pytest.raises(TypeError, match="group must be a process group"):
        quire.MoE(32, 32, 4, ep_group=3)
    with pytest.raises(ValueError, match="ep_capacity must be at least 1, got 0; None is for any number of rows"):
        quire.MoE(32, 32, 4, ep_group=group, ep_capacity=0)
    with pytest.raises(ValueError, match="got 8 without one"):
        quire.MoE(32, 32, 4, ep_capacity=8)
    with pytest.raises(ValueError, match="ep_overflow must be 'raise' or 'drop', got 'ignore'"):
        quire.MoE(32, 32, 4, ep_group=group, ep_overflow="ignore")
    with pytest.raises(ValueError, match="ep_dispatch must be 'values' or 'codes', got 'bits'"):
        quire.MoE(32, 32, 4, ep_group=group, ep_dispatch="bits")
    sends_codes = quire.MoE(32, 32, 4, ep_group=group, ep_dispatch="codes")
    for recipe, why in (
        ("fp8_current", "whose x, fp8_tensor:nan, has a scale of all rows of an expert; use ep_dispatch='values'"),
        ("nvfp4", "has a scale of all rows of an expert"),
        ("fp8_block_x2d", "has scales that rows share"),
        ("mxfp8", "is needed as values, or in blocks of tokens, unless backward_override is 'dequantized'"),
        ("mxfp8_high_precision", "is needed as values, or in blocks of tokens"),
    ):
        with quire.autocast(recipe=TABLE[recipe]), pytest.raises(NotImplementedError, match=why):
            sends_codes(torch.randn(4, 32))
    mesh, layer = init_device_mesh("cpu", (2,)), quire.MoE(32, 32, 4)
    with pytest.raises(NotImplementedError, match="ExpertParallel of a Linear: only a quire.MoE has experts"):
        parallelize_module(quire.Linear(32, 32), mesh, ExpertParallel())
    with pytest.raises(ValueError, match="number of experts, 3, must be a multiple"):
        parallelize_module(quire.MoE(32, 32, 3), mesh, ExpertParallel())
    with pytest.raises(ValueError, match="device_mesh must have one dimension, such as mesh.'ep'."):
        parallelize_module(layer, init_device_mesh("cpu", (1, 1, 2)), ExpertParallel())
    with (
        quire.quantized_model_init(recipe="mxfp8"),
        pytest.raises(NotImplementedError, match="weight0 must be a plain"),
    ):
        parallelize_module(quire.MoE(32, 32, 4), mesh, ExpertParallel())
    for options, error, why in (
        ({"capacity": -1}, ValueError, "capacity must be at least 1, got -1"),
        ({"capacity": "a"}, TypeError, "capacity must be an int, got 'a'"),
        ({"overflow": "foo"}, ValueError, "overflow must be 'raise' or 'drop', got 'foo'"),
        ({"dispatch": "foo"}, ValueError, "dispatch must be 'values' or 'codes', got 'foo'"),
    ):
        with pytest.raises(error, match=f"^ExpertParallel: {why}"):
            ExpertParallel(**options)
    parallelize_module(layer, mesh, ExpertParallel())
    with pytest.raises(ValueError, match="its experts are sharded over ranks already"):
        parallelize_module(layer, mesh, ExpertParallel())
    with pytest.raises(NotImplementedError, match=r"x is a DTensor with .* pass this rank's tokens, x.to_local\(\)"):
        layer(distribute_tensor(torch.randn(4, 32), mesh, [Shard(0)]))


@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4", "fp8_block", "fp8_block:pow2", "fp8_row", "nvfp4:row_scaled"])
def test_unpacked_rows_are_those_of_groups(spec):
    x, weights, ends = torch.randn(20, 384), [torch.randn(32, 384) for _ in range(3)], torch.tensor([7, 7, 18])
    payload, fields = pack(x, spec)
    call = {"dtype": x.dtype, "recipe": f"x={spec},w=mxfp8,dy=mxfp8,backward=dequantized"}
    expected = quire.functional.grouped_linear(x, weights, [], ends, **call)[0]
    codes = unpack(payload, fields, spec, ends)
    nothing = torch.empty(1).expand(20, 384)
    assert torch.equal(
        quire.functional.grouped_linear(nothing, weights, [], ends, x_buffers=codes, **call)[0], expected
    )
