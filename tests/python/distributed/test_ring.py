"""Parallel(overlap="ring"): tokens are exchanged in pieces, with the bits of one exchange."""

import itertools
import re

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import quire
from every_recipe import IN_ANY_PRECISION, STATIC, TABLE
from pairwise import each_value, pairwise
from python.distributed.parallel_graphs import IN, OUT, TOKENS, graphs, inputs
from python.distributed.parallel_layers import OPTIONS, RECIPES, WAYS, Case
from python.distributed.ring_ranks import a_style_equals_the_plain_way, equals_the_plain_way, without_gradients
from quire.distributed import ColumnParallel, Parallel, RowParallel
from ranks import rank_of

MODES = ("column", "row")
#: Of two processes each: whole blocks; pieces of no block, of one row, of none; three dimensions.
SIZES = ((256,), (14,), (2,), (0,), (6, 5))
#: One for each way in which scales follow from a tensor, and for what backward multiplies.
SOME = (
    "fp8_current",
    "fp8_block_x2d",
    "mxfp8",
    "nvfp4",
    "nvfp4_row_scaled",
    "delayed",
    "mxfp8_dequantized",
    "weight_only",
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_results_are_those_of_one_exchange(two, recipe):
    at = list(RECIPES).index(recipe)
    whole_blocks, other = SIZES[0] if "fp8_block" in recipe else (64,), SIZES[1 + at % 4]
    for tokens, mode in ((whole_blocks, MODES[at % 2]), (other, MODES[(at + 1) % 2])):
        two.run(equals_the_plain_way, Case(recipe, "Linear", mode, True, tokens))


@pytest.mark.parametrize(("mode", "tokens", "dtype"), pairwise(MODES, SIZES, (torch.float32, torch.bfloat16)))
def test_any_number_of_tokens(two, mode, tokens, dtype):
    for recipe in ("nvfp4", "fp8_block_x2d", "high_precision"):
        two.run(equals_the_plain_way, Case(recipe, "Linear", mode, True, tokens, dtype=dtype))


@pytest.mark.parametrize(("recipe", "way", "mode"), each_value(SOME, [way for way in WAYS if way != "eager"], MODES))
def test_other_ways_to_run_a_layer(two, recipe, way, mode):
    two.run(equals_the_plain_way, Case(recipe, "Linear", mode, True, way=way))


@pytest.mark.parametrize(
    ("recipe", "option", "mode"), each_value(("nvfp4", "mxfp8_dequantized"), range(len(OPTIONS)), MODES)
)
def test_options_of_the_layer(two, recipe, option, mode):
    two.run(equals_the_plain_way, Case(recipe, "Linear", mode, True, options=OPTIONS[option]))


@pytest.mark.parametrize(
    ("recipe", "kind", "way"),
    pairwise(
        ("mxfp8", "delayed", "nvfp4"), ("LayerNormLinear", "LayerNormMLP", "LayerNormMLP swiglu"), ("eager", "compiled")
    ),
)
def test_layers_with_a_norm(two, recipe, kind, way):
    two.run(equals_the_plain_way, Case(recipe, kind, "column", True, (14,), way=way))


@pytest.mark.parametrize(("mode", "reduce"), list(itertools.product(MODES, ("float32", "mxfp8"))))
def test_sums_in_the_order_of_ranks(two, mode, reduce):
    for recipe, tokens in (("mxfp8", (64,)), ("nvfp4", (6, 5)), ("fp8_current", (2,))):
        two.run(equals_the_plain_way, Case(recipe, "Linear", mode, True, tokens, dtype=torch.bfloat16), reduce)


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_of_x_that_is_rounded(two, mode):
    two.run(equals_the_plain_way, Case("fp8_current", "Linear", mode, True, call={"fp8_grad": True}))


@pytest.mark.parametrize("mode", MODES)
def test_passes_without_gradients(two, mode):
    for recipe in ("nvfp4", *STATIC):
        two.run(without_gradients, Case(recipe, "Linear", mode, True))


@pytest.mark.parametrize(("mode", "way"), [("column", "eager"), ("row", "compiled")])
def test_styles_of_parallelize_module(two, mode, way):
    two.run(a_style_equals_the_plain_way, Case("mxfp8", "Linear", mode, True, way=way))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_four_processes(four, mode):
    for recipe, tokens in (("mxfp8", (64,)), ("nvfp4", (12,)), ("fp8_current", (8, 3))):
        four.run(equals_the_plain_way, Case(recipe, "Linear", mode, True, tokens), "float32")


# ---------------------------------------------------------------- graphs


@pytest.fixture
def group():
    with rank_of(0, 2) as group:
        yield group


def ring(mode, group):
    return quire.Linear(IN, OUT, parallel=Parallel(mode, group, sequence=True, overlap="ring"))


#: What a graph has for two pieces, a product of one between the start and the wait of the other. And the rest waits.
ORDERS = {
    "arrives": "broadcast broadcast wait_tensor {0} wait_tensor {0}",
    "is scattered": "{0} reduce_scatter_tensor {0} reduce_scatter_tensor",
}


@pytest.mark.parametrize(("recipe", "mode"), each_value(list(IN_ANY_PRECISION), MODES))
def test_a_product_stands_between_the_start_of_a_piece_and_its_wait(group, recipe, mode):
    tokens, features = (128, IN) if mode == "column" else (256, IN // 2)  # whole blocks of each process
    x = torch.randn(tokens, features, requires_grad=True)
    (forward, _, _), (backward, _, _) = graphs(ring(mode, group), x, IN_ANY_PRECISION[recipe])
    dgrad = "linear_unquantized_bwd" if recipe == "high_precision" else "linear_dgrad"
    forth, back = ("arrives", "is scattered") if mode == "column" else ("is scattered", "arrives")
    for names, order, product in ((forward, ORDERS[forth], "linear_fwd"), (backward, ORDERS[back], dgrad)):
        seen = " ".join(n for n in names if n in (product, "linear_wgrad", "wait_tensor") or n in order.split())
        assert seen.count(order.format(product)) == 1, seen
    if mode == "column":  # gradients of weight and bias are computed beside the last sum
        assert backward[-2:] == ["wait_tensor"] * 2
        assert any("wgrad" in name or "unquantized" in name for name in backward[-4:-2])
    assert not any("all_gather" in name for name in forward)


def test_inductor_multiplies_one_piece_while_another_one_travels(group):
    def run():
        with quire.autocast(recipe="mxfp8"):
            y = torch.compile(ring("column", group), fullgraph=True)(inputs("column", True))
        y.sum().backward()

    passes = {"reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"]}
    uncached = {"fx_graph_cache": False, "reorder_for_compute_comm_overlap": True}
    with config.patch(passes | uncached), torch._functorch.config.patch(enable_autograd_cache=False):
        _, codes = run_and_get_code(run)

    forward, backward = (
        re.findall(r"torch\.ops\.(?:quire|_c10d_functional)\.(\w+)\.default\(", code) for code in codes
    )
    last_start = len(forward) - 1 - forward[::-1].index("broadcast_")
    assert "linear_fwd" in forward[last_start : len(forward) - forward[::-1].index("wait_tensor")]
    first = backward.index("reduce_scatter_tensor")
    assert "linear_dgrad" in backward[first : backward.index("wait_tensor", first)]


def test_graphs_in_pieces_are_the_same_text_on_every_rank():
    texts = []
    for rank in (0, 3):
        with rank_of(rank, 4) as world:
            found = [graphs(ring(mode, world), inputs(mode, True, 4), TABLE["nvfp4"]) for mode in MODES]
            texts.append([text for one in found for _, _, text in one])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("tokens", "in_pieces"), [(512, True), (TOKENS, False)])
def test_explain_says_whether_tokens_are_exchanged_in_pieces(group, tokens, in_pieces):
    # Blocks of 128 x 128: those of 64 tokens are shared by processes.
    for mode, piece, whole in (("column", "broadcast", "all_gather"), ("row", "reduce_scatter", "reduce_scatter")):
        x = torch.randn(tokens // 2, IN) if mode == "column" else torch.randn(tokens, IN // 2)
        with quire.autocast(recipe=TABLE["fp8_block_x2d"]):
            report = quire.explain(ring(mode, group), x)
        found = [step.problem.split(" ")[0] for step in report.steps if step.operation == "collective"]
        wanted = [piece] * 2 if in_pieces else [whole]
        assert found[: len(wanted)] == wanted and (in_pieces or "broadcast" not in found)


@pytest.mark.parametrize(("mode", "overlap"), list(itertools.product(MODES, (None, "ring"))))
def test_what_a_rank_quantizes_has_its_role_though_others_read_the_codes(group, mode, overlap):
    layer = quire.Linear(IN, OUT, parallel=Parallel(mode, group, True, overlap=overlap))
    x = inputs(mode, True)
    with quire.autocast(recipe="mxfp8"):
        report = quire.explain(layer, x)
        with quire.debug.statistics() as counts:
            layer(x).sum().backward()
    assert [step.name for step in report.quantizations] == ["x", "w", "dy"]
    every = {(role, direction) for role in ("x", "w", "dy") for direction in ("rowwise", "columnwise")}
    assert {(row.role, row.direction) for row in counts} == every
    # Of codes that came from other ranks none were quantized here, wherever they lie.
    gathered = "x" if mode == "column" else "dy"
    read = [operand for step in report.products for operand in step.operands if operand.role == gathered]
    assert overlap or not any(operand.made for operand in read if operand.outer * operand.contraction == IN * TOKENS)


def test_what_does_not_go_with_a_ring_is_said_in_words(group):
    with pytest.raises(ValueError, match="overlap must be None or 'ring', got 'tree'"):
        Parallel("column", group, True, overlap="tree")
    with pytest.raises(ValueError, match="overlap='ring' exchanges tokens in pieces, and goes with sequence=True"):
        Parallel("row", group, overlap="ring")
    with pytest.raises(ValueError, match="ColumnParallel: overlap must be None or 'ring', got 'tree'"):
        ColumnParallel(overlap="tree")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    layer = quire.Linear(IN, OUT)
    with pytest.raises(ValueError, match=r"goes with output_layouts=Shard\(0\); got RowParallel\(.*overlap='ring'\)"):
        torch.distributed.tensor.parallel.parallelize_module(layer, mesh, RowParallel(overlap="ring"))
    assert type(layer.weight) is torch.nn.Parameter and layer.parallel is None
    with pytest.raises(RuntimeError, match="then ',overlap=ring' .* got 'column,group=quire:tp,size=2,overlap=ring'"):
        torch.ops.quire.parallel_linear(
            torch.randn(4, 4),
            torch.randn(4, 4),
            None,
            "",
            torch.float32,
            "column,group=quire:tp,size=2,overlap=ring",
            [],
            [],
        )
