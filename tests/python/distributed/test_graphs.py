"""Graphs of layers that are sharded over processes, traced for many ranks in one process by PyTorch's fake group."""

import math
import re

import pytest
import torch
from torch import distributed
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import quire
from every_recipe import IN_ANY_PRECISION, STATIC
from python.distributed.parallel_graphs import IN, OUT, TOKENS, graphs, inputs
from python.distributed.parallel_layers import RECIPES, with_scales
from quire.distributed import Parallel, check_ranks, name_group, shard_weights
from ranks import rank_of


@pytest.fixture
def group(device):
    with rank_of(0, 2, device.type) as group:
        yield group


@pytest.mark.parametrize("name", [name for name in IN_ANY_PRECISION if name != "delayed"])
def test_the_gradient_of_the_weight_is_computed_while_that_of_x_is_reduced(group, name, device):
    layer = quire.Linear(IN, OUT, parallel=Parallel("column", group, sequence=True)).to(device)
    _, (names, _, _) = graphs(layer, inputs("column", True, device=device), IN_ANY_PRECISION[name])
    dgrad, wgrad = ("linear_unquantized_bwd",) * 2 if name == "high_precision" else ("linear_dgrad", "linear_wgrad")
    begin = names.index("reduce_scatter_tensor")
    assert names[begin - 1] == dgrad and wgrad in names[begin:] and names[-1] == "wait_tensor"


@pytest.mark.parametrize("sequence", [False, True])
def test_inductor_computes_the_gradient_of_the_weight_during_the_reduction(group, sequence):
    layer = quire.Linear(IN, OUT, parallel=Parallel("column", group, sequence))

    def run():
        with quire.autocast(recipe="mxfp8"):
            y = torch.compile(layer, fullgraph=True)(inputs("column", sequence))
        y.sum().backward()

    passes = {"reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"]}
    uncached = {"fx_graph_cache": False, "reorder_for_compute_comm_overlap": True}
    with config.patch(passes | uncached), torch._functorch.config.patch(enable_autograd_cache=False):
        _, (_, backward) = run_and_get_code(run)
    calls = re.findall(r"torch\.ops\.(?:quire|_c10d_functional)\.(\w+)\.default\(", backward)
    start = calls.index("reduce_scatter_tensor" if sequence else "all_reduce_")
    assert calls[start - 1] == "linear_dgrad"
    assert calls.index("linear_wgrad", start) < len(calls) - 1 and calls[-1] == "wait_tensor"


@pytest.mark.parametrize("name", IN_ANY_PRECISION)
def test_what_lasts_from_forward_to_backward_is_of_this_process(group, name, device):
    layer = quire.Linear(IN, OUT, bias=False, parallel=Parallel("column", group, sequence=True)).to(device)
    (_, shapes, _), (names, _, _) = graphs(layer, inputs("column", True, device=device), IN_ANY_PRECISION[name])
    shapes.remove((TOKENS, OUT // 2))  # y
    assert any("all_gather" in name for name in names)
    most = max(torch.Size(shape).numel() for shape in shapes)
    assert most <= max(layer.weight.numel(), TOKENS // 2 * IN)  # and no x of all processes, of TOKENS * IN


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_collectives_are_nodes_without_gradients_too(group, mode, sequence, device):
    layer = quire.Linear(IN, OUT, parallel=Parallel(mode, group, sequence)).to(device)
    with torch.no_grad():
        ((names, _, _),) = graphs(layer, inputs(mode, sequence, device=device), IN_ANY_PRECISION["mxfp8"])
    wanted = {
        ("column", False): [],
        ("column", True): ["all_gather_into_tensor_coalesced"],
        ("row", False): ["all_reduce"],
        ("row", True): ["reduce_scatter_tensor"],
    }
    assert [name for name in names if name.startswith(("all_", "reduce_"))] == wanted[mode, sequence]
    assert "linear_fwd" in names and "parallel_linear" not in names


@pytest.mark.parametrize("sends", ["gloo", "nccl"])
def test_a_graph_has_the_collectives_of_what_sends_tensors_of_its_device(sends, group, device, monkeypatch):
    others = {"cpu": "gloo", "cuda": "gloo", "quiretest": "gloo"} if sends == "nccl" else {}
    config = ",".join(f"{name}:{backend}" for name, backend in (others | {device.type: sends}).items())
    monkeypatch.setattr(distributed, "get_backend_config", lambda _=None: config)
    monkeypatch.setattr(check_ranks, "_compare", lambda *_: None)  # the other rank is not there
    found = {}
    for mode in ("column", "row"):
        layer = quire.Linear(IN, OUT, parallel=Parallel(mode, group, sequence=True)).to(device)
        with torch.no_grad():
            ((names, _, code),) = graphs(layer, inputs(mode, True, device=device), IN_ANY_PRECISION["mxfp8"])
        assert ("quire.agree_" in code) == (sends == "gloo")
        found[mode] = [name for name in names if name.startswith(("all_", "reduce_"))]
    gather = ["all_gather_into_tensor_coalesced"]
    if sends == "gloo" and device.type != "cpu":  # of codes, and then of scales
        gather = ["all_to_all_single"] * 2
    assert found == {"column": gather, "row": ["reduce_scatter_tensor"]}


@pytest.mark.parametrize("name", ["high_precision", "fp8_current", "mxfp8", "nvfp4"])
def test_graphs_are_the_same_text_on_every_rank(name, device):
    texts = []
    for rank in (0, 1, 63):
        with rank_of(rank, 64, device.type) as world:
            others = distributed.new_group([(rank + i) % 64 for i in range(2)])  # of another name on each rank
            del others
            layer = quire.Linear(IN, 64, parallel=Parallel("row", world, sequence=True)).to(device)
            found = graphs(layer, inputs("row", True, 64, device), IN_ANY_PRECISION[name])
            texts.append([text for _, _, text in found])
    assert texts[0] == texts[1] == texts[2]


#: python -c ONE_RANK RANK prints how often it found compiled code in the cache.
ONE_RANK = """
import contextlib, json, sys, torch, quire
from torch._dynamo.utils import counters
from python.distributed.parallel_graphs import IN, OUT, inputs
from quire.distributed import Parallel
from ranks import rank_of
with rank_of(int(sys.argv[1]), 2) as world:
    layer = quire.LayerNormMLP(IN, OUT, parallel=Parallel("column", world, sequence=True))
    for recipe in ("nvfp4", "fp8_delayed"):
        with quire.autocast(recipe=recipe):
            y = torch.compile(layer, fullgraph=True)(inputs("column", True))
        y.sum().backward()
    mixture = quire.MoE(32, 32, 4, ep_group=world, single_grouped_weight=True)
    # The fake group gives no numbers of rows.
    with contextlib.suppress(RuntimeError), torch.no_grad(), quire.autocast(recipe="nvfp4"):
        torch.compile(mixture, fullgraph=True)(torch.randn(8, 32))
    print(json.dumps([counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")]
                     + [counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")]))
"""


@pytest.mark.slow
def test_a_rank_finds_the_compiled_graphs_of_another_in_the_cache(with_one_cache):
    # A forward and a backward graph for each recipe, and a forward graph of the mixture.
    assert with_one_cache(ONE_RANK, "0") == [0, 3, 0, 0, 5]
    assert with_one_cache(ONE_RANK, "1") == [3, 0, 0, 5, 0]


@pytest.mark.parametrize("name", ["mxfp8", *STATIC])
def test_an_exported_program_has_one_node_and_finds_its_group_by_name(group, name):
    recipe = RECIPES[name]
    layer = with_scales(quire.Linear(IN, OUT, parallel=Parallel("column", name_group(group, "tp"))), recipe)
    x = torch.randn(TOKENS, IN)
    with torch.no_grad(), quire.autocast(recipe=recipe):
        program, expected = torch.export.export(layer, (torch.randn(TOKENS, IN),)), layer(x)
    nodes = [node for node in program.graph.nodes if "quire" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["quire.parallel_linear.default"]
    assert "column,group=tp,size=2" in nodes[0].args
    with torch.no_grad():
        assert expected.shape == (TOKENS, OUT // 2) and torch.equal(program.module()(x), expected)


def test_names_of_groups(group):
    assert name_group(group, "tp") == name_group(group, "tp") == "tp"
    other = distributed.new_group([0, 1])
    with pytest.raises(ValueError, match="another process group is named 'tp' already"):
        name_group(other, "tp")
    assert Parallel("row", group).group == Parallel("row", group).group == "quire:tp"
    assert Parallel("row", other).group == "quire:tp1"
    with pytest.raises(ValueError, match="no comma, got 'a,b'"):
        name_group(group, "a,b")
    with pytest.raises(TypeError, match="group must be a process group"):
        name_group("tp", "tp")


def test_a_group_that_is_not_there_is_said_in_words(group):
    with pytest.raises(ValueError, match=r"no process group is named 'nowhere'.*name_group\(group, name\) first"):
        Parallel("column", "nowhere")
    layer = quire.Linear(IN, OUT, parallel=Parallel("row", name_group(group, "passing"), sequence=True))
    distributed.distributed_c10d._unregister_process_group("passing")
    with pytest.raises(RuntimeError, match="passing"):
        layer(torch.randn(TOKENS, IN // 2))


def test_what_a_sharded_layer_does_not_do_is_refused(group):
    column = Parallel("column", group)
    with pytest.raises(ValueError, match="Parallel: mode must be 'column' or 'row', got 'diagonal'"):
        Parallel("diagonal", group)
    with pytest.raises(ValueError, match="out_features=255 must be a multiple of the 2 ranks of 'quire:tp'"):
        quire.Linear(IN, 255, parallel=column)
    with pytest.raises(ValueError, match="in_features=255 must be a multiple"):
        quire.Linear(255, OUT, parallel=Parallel("row", group))
    with pytest.raises(ValueError, match="parallel must have mode 'column', got 'row'"):
        quire.LayerNormLinear(IN, OUT, parallel=Parallel("row", group))
    with pytest.raises(TypeError, match="parallel must be a Parallel, got 'column'"):
        quire.Linear(IN, OUT, parallel="column")
    layer, x = quire.Linear(IN, OUT, parallel=column), torch.randn(4, IN)
    with quire.autocast(recipe="mxfp8"):
        with pytest.raises(NotImplementedError, match="x must be a plain tensor, got a QuantizedTensor"):
            layer(quire.quantize(x, "mxfp8"))
        with pytest.raises(NotImplementedError, match="results are not quantized"):
            layer(x, fp8_output=True)
    plain = "a weight that is sharded over ranks must be a plain parameter.* keep codes with quire.quantize_weights"
    with quire.quantized_model_init(recipe="fp8_current"), pytest.raises(NotImplementedError, match=plain):
        quire.Linear(IN, OUT, parallel=column)
    with pytest.raises(ValueError, match="its weight is sharded over ranks, and must stay a plain parameter"):
        quire.convert(torch.nn.Sequential(layer), "mxfp8", for_inference=True, tokens=None)
    assert type(layer.weight) is torch.nn.Parameter and layer.recipe is None
    layer.weight = torch.nn.Parameter(quire.quantize(layer.weight.detach(), "mxfp8"))
    with quire.autocast(recipe="mxfp8"), pytest.raises(NotImplementedError, match=plain):
        layer(x)
    with pytest.raises(ValueError, match=r"each of the parts \(255, 1\) of the outputs must be a multiple of the 2"):
        quire.Linear(IN, 256, parallel=column.of_parts(255, 1))
    with pytest.raises(ValueError, match="parallel.parts must make up out_features=256, got"):
        quire.Linear(IN, 256, parallel=column.of_parts(64, 64))
    with pytest.raises(ValueError, match="parts are of the outputs, which mode 'row' does not shard"):
        Parallel("row", group, parts=(2, 2))
    with pytest.raises(ValueError, match=r"the outputs of this layer are the parts \(256, 256\), got parts=\(128,"):
        quire.LayerNormMLP(IN, 256, activation="swiglu", parallel=column.of_parts(128, 384))


MULTIPLES = "of the outputs must be a multiple of the 2 ranks"
WRONG = {
    "no spec": (
        {"reduce": "foo"},
        ValueError,
        "reduce must be '', 'float32' or a spec .* got 'foo': spec: unknown fam",
    ),
    "random bits": ({"reduce": "nvfp4:sr"}, ValueError, "reduce must be .* got 'nvfp4:sr': .* without stochastic"),
    "a scale of the caller": ({"reduce": "fp8_tensor:given"}, ValueError, "reduce must be .* remove 'given'"),
    "two options in one": (
        {"reduce": "mxfp8,own_gradients"},
        ValueError,
        "reduce must be .* got 'mxfp8,own_gradients'",
    ),
    "uneven parts": ({"parts": (3, 5)}, ValueError, rf"each of the parts \(3, 5\) {MULTIPLES}"),
    "a negative part": ({"parts": (-2, 4)}, ValueError, r"parts must not be negative, got \(-2, 4\)"),
    "a text in parts": ({"parts": ("a",)}, TypeError, r"parts must be .* ints, such as \(1024, 256\); got \('a',\)"),
    "a text for parts": ({"parts": "ab"}, TypeError, "parts must be .* got 'ab'"),
    "one number for parts": ({"parts": 4}, TypeError, "parts must be .* got 4"),
    "nothing for parts": ({"parts": None}, TypeError, "parts must be .* got None"),
    "a text for a size": ({"size": "a"}, TypeError, "size must be an int, got 'a'"),
    "a fraction for a size": ({"size": 2.0}, TypeError, "size must be an int, got 2.0"),
    "a negative size": ({"size": -2}, ValueError, "size must be the number of ranks, .* got -2"),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("options, error, words", WRONG.values(), ids=WRONG)
def test_what_does_not_say_how_a_weight_is_sharded_is_refused(group, named, options, error, words):
    with pytest.raises(error, match=f"^Parallel: {words}"):
        Parallel("column", group if named else None, **{"size": 2} | options)


@pytest.mark.cpu_only
def test_what_is_no_mesh_is_refused_and_leaves_weights_whole():
    layer = quire.Linear(IN, OUT)
    for mesh in (None, "dp", 2):
        with pytest.raises(TypeError, match=f"^shard_weights: mesh must be a DeviceMesh .* got {mesh!r}"):
            shard_weights(layer, mesh)
    assert type(layer.weight) is torch.nn.Parameter and layer.shards is None


def test_wrong_arguments_of_the_operator_are_refused(group):
    x, w, recipe = torch.randn(4, 32), torch.randn(32, 32), "x=nvfp4,w=nvfp4,dy=nvfp4:sr"
    call = torch.ops.quire.parallel_linear
    row = Parallel("row", group, sequence=True).text
    with pytest.raises(RuntimeError, match="parallel must say how w is sharded, got ''"):
        call(x, w, None, "", torch.float32, "", [], [])
    for text in ("column", "column,group=,size=2", "row,group=a,size=0", "row,group=a,size=2x", "row,group=a,size=2,s"):
        with pytest.raises(RuntimeError, match=f"parallel must be .* got '{text}'"):
            call(x, w, None, "", torch.float32, text, [], [])
    with pytest.raises(RuntimeError, match=r"x is one token \[K\]; pass \[tokens, K\]"):
        call(x[0], w, None, "", torch.float32, row, [], [])
    with pytest.raises(RuntimeError, match="the first dimension of x must be a multiple of the 2 ranks of 'quire:tp"):
        call(x[:3], w, None, "", torch.float32, row, [], [])
    with pytest.raises(RuntimeError, match="each rank needs its own bits: part must be an int64"):
        call(x, w.requires_grad_(), None, recipe, torch.float32, row, [], [], sr_state=torch.tensor([1, 0]))
    given, scale, column = "x=fp8_tensor:given,w=fp8_row,dy=fp8_row", torch.ones(1), Parallel("column", group).text
    for recipe, scales, said in (
        ("x=fp8_tensor,w=fp8_row,dy=fp8_row", {"input_scale": scale}, "x has no scale of the layer; leave input_scale"),
        ("", {"input_scale": scale}, "x has no scale of the layer; leave input_scale out"),
        (given, {}, "x has its scale from the caller, and there is no input_scale; give the static scale"),
        (given, {"input_scale": scale, "fwd_scale": torch.ones(3)}, "input_scale and fwd_scale are both given"),
        (f"{given},backward=high_precision", {"input_scale": scale}, "the gradient of w starts from x itself"),
        (given, {"input_scale": torch.ones(2)}, r"scale must be .* \[2\]"),
        (given, {"input_scale": torch.zeros(1)}, "static scale.*must be positive and finite"),
    ):
        with pytest.raises(RuntimeError, match=said):
            call(x, w, None, recipe, torch.float32, column, [], [], **scales)
    with pytest.raises(RuntimeError, match="parallel_grouped_linear: .* there is no input_scale"):
        offsets, part = torch.tensor([4]), torch.tensor([0, 2])
        torch.ops.quire.parallel_grouped_linear(x, [w], [], offsets, part, given, torch.float32, column, [], [])
    with pytest.raises(RuntimeError, match="sum_gradient: parallel must name a group, got ''"):
        torch.ops.quire.sum_gradient(x, "")


def test_parts_of_a_layer_draw_from_one_stream():
    seeds = []
    for rank in (0, 1):
        with rank_of(rank, 2) as world:
            torch.manual_seed(0)
            layer = quire.Linear(IN, OUT, parallel=Parallel("column", world))
            seeds.append(layer.sr_state.tolist())
            assert layer.part.tolist() == [rank, 2]
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize(("tokens", "gathered"), [(TOKENS, "uint8"), (14, "float32")])
def test_explain_says_whether_codes_or_values_of_tokens_are_gathered(group, tokens, gathered):
    layer = quire.Linear(IN, OUT, parallel=Parallel("column", group, sequence=True))
    with quire.autocast(recipe="mxfp8"):
        report = quire.explain(layer, torch.randn(tokens // 2, IN))
    found = [step.problem for step in report.steps if step.operation == "collective"]
    assert [problem.split(" ")[0] for problem in found] == ["all_gather", "all_gather", "reduce_scatter"]
    assert found[0].startswith("all_gather of uint8 [") and found[0].endswith("over 'quire:tp'")
    assert found[1].startswith(f"all_gather of {gathered} [")  # of blocks along tokens, which processes may share
    assert found[2] == f"reduce_scatter sum of float32 [{tokens}, {IN}] over 'quire:tp'"


def test_explain_lists_collectives_of_passes_without_gradients(group):
    layers = {
        mode: quire.Linear(IN, OUT, parallel=Parallel(mode, group, sequence=True)) for mode in ("column", "row")
    } | {"experts": quire.MoE(IN, OUT, 2, tp_group=group)}
    collectives = {
        "column": ["all_gather of uint8 [8192], uint8 [256] over 'quire:tp'"],
        "row": [f"reduce_scatter sum of float32 [{TOKENS}, {OUT}] over 'quire:tp'"],
        "experts": [f"all_reduce sum of float32 [{2 * TOKENS}, {IN}] over 'quire:tp'"],
    }
    for name, layer in layers.items():
        x = inputs("row" if name == "row" else "column", name == "column").detach()
        for without in (torch.no_grad(), torch.inference_mode()):
            with without, quire.autocast(recipe="mxfp8"):
                steps = quire.explain(layer, x).steps
            assert [step.problem for step in steps if step.operation == "collective"] == collectives[name]
            assert {step.name for step in steps if step.operation == "gemm"} == {"fprop"}


SHARDED = ["high_precision", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]


def sharded_graphs(name):
    """Of two layers whose weights shard_weights divides over two processes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[quire.Linear(*sizes, bias=False) for sizes in ((IN, 2 * OUT), (2 * OUT, OUT))])
    shard_weights(model, init_device_mesh("cpu", (2,)), IN_ANY_PRECISION[name])
    return graphs(model, torch.randn(TOKENS, IN, requires_grad=True), IN_ANY_PRECISION[name])


@pytest.mark.parametrize("name", SHARDED)
def test_weights_are_gathered_beside_the_weight_gradient_and_it_is_reduced_beside_that_of_x(group, name):
    _, (names, _, _) = sharded_graphs(name)
    collectives = ["all_gather_into_tensor", "wait_tensor", "reduce_scatter_tensor", "wait_tensor"]
    products = ("linear_wgrad", "linear_dgrad", "linear_unquantized_bwd")
    kept = [name for name in names if name in products or name in collectives]
    wgrad, dgrad = ("linear_unquantized_bwd",) * 2 if name == "high_precision" else products[:2]
    assert kept == [collectives[0], wgrad, *collectives[1:3], dgrad, collectives[3]] * 2


@pytest.mark.parametrize("name", SHARDED)
def test_this_process_rows_are_kept_for_the_backward_pass_and_the_whole_weight_is_not(group, name):
    (_, shapes, _), _ = sharded_graphs(name)
    assert {(OUT, IN), (OUT // 2, 2 * OUT)} <= set(shapes)
    weight = 2 * OUT * IN  # one of them
    kept = [math.prod(shape) for shape in shapes if shape not in ((OUT, IN), (OUT // 2, 2 * OUT))]
    assert max(kept) < weight // 2


def test_graphs_of_sharded_rows_are_the_same_on_every_rank():
    texts = []
    for rank in range(2):
        with rank_of(rank, 2):
            texts.append([text for _, _, text in sharded_graphs("nvfp4")])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("option", [{"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}], ids=str)
def test_a_layer_that_refuses_its_second_matmul_has_not_run_the_first(group, option, device):
    layer = quire.LayerNormMLP(IN, OUT, parallel=Parallel("column", group), **option).to(device)
    layer.fc1_weight.requires_grad_(False)  # so that the first one is not refused
    x = torch.ones(4, IN, device=device)
    with quire.autocast(recipe=quire.recipe.DelayedScaling()), quire.distributed.exact():
        with pytest.raises(NotImplementedError, match="fuse_wgrad_accumulation and delay_wgrad_compute"):
            layer(x)
    assert not layer.fc1_delayed.fwd_amax.any()
