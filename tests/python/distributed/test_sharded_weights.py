"""Weights that fully_shard divides over processes: values or codes are gathered, compared with one process and with
each other."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from every_recipe import ALL, TABLE
from pairwise import pairwise
from python.distributed.prepared_ranks import (
    blocks_may_be_wrapped_before_they_are_sharded,
    copies_are_prepared_too,
    errors,
    evaluation_between_steps,
    layers_of_a_graph_are_ordinary,
    models_leave_the_meta_device,
    only_what_a_pass_needs_is_there,
    optimizers_update_masters,
    states_are_plain,
    tied_weights_stay_tied,
)
from python.distributed.shard_ranks import (
    Case,
    an_explanation_keeps_nothing_gathered,
    codes_equal_values,
    explanations_change_nothing,
    linears_share_their_gathers,
    quantized_parameters_have_masters,
    sharded_features_and_rows,
    shards_equal_replicas,
    static_scales_equal_one_process,
    values_equal_one_process,
    weights_of_a_graph_equal_values,
)
from python.tensor.tensor_specs import SPECS
from quire import Linear
from quire.distributed import gather_codes, shard_weights
from quire.distributed.code_payload import alike, pack, unpack, why_not
from quire.functional import amax, quantize
from quire.tensor import QuantSpec
from ranks import rank_of

#: Whose codes can be gathered, and whose rounding does not depend on the rank.
WITH_CODES = [
    name for name, recipe in TABLE.items() if recipe is not None and recipe.backward_override != "high_precision"
]
SAME_ON_RANKS = ["high_precision", "fp8_current", "fp8_block", "mxfp8", "nvfp4_no_sr"]
KINDS = ["linears", "norms", "grouped", "mixture", "checkpoint"]


# ------------------------------------------------------------ parts


#: The rows of a block.
BLOCKS = {"fp8_tensor": 1, "fp8_row": 1, "fp8_block": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "swizzled" not in spec and "interleaved" not in spec])
def test_codes_of_parts_that_end_on_blocks_are_those_of_the_whole(spec):
    block = BLOCKS[spec.split(":")[0]]
    assert [rows for rows in range(1, 4 * block) if not why_not(QuantSpec(spec), rows)] == [
        block * i for i in range(1, 4)
    ]
    values = torch.randn(4 * block, 256, generator=torch.Generator().manual_seed(0))
    measured = not spec.startswith(("fp8_block", "mx"))
    amaxes = amax(values, spec, True, True) if measured else None
    whole, found = (quantize(t, spec, True, True) for t in (values, torch.zeros_like(values)))
    payload = []
    for i, part in enumerate(values.split(2 * block)):
        own = amaxes
        if measured and amaxes[0].numel() == len(values):  # one for each row, and for each column
            own = (amaxes[0].split(2 * block)[i], amaxes[1])
        q = quantize(part, spec, True, True, amax=own)
        payload.append(pack(q))
        for name, tensor in alike(q).items():
            found.buffers()[name].copy_(tensor)
    unpack(torch.cat(payload), 2, found.spec_text, found.buffers())
    for name, tensor in whole.buffers().items():
        assert torch.equal(found.buffers()[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("spec", ["mxfp8:swizzled", "nvfp4:16x16:interleaved"])
def test_codes_in_tiles_of_several_rows_are_not_put_together(spec):
    assert why_not(QuantSpec(spec), 1024).endswith(f"several rows together ({spec.split(':')[-1]})")
    recipe = f"x=mxfp8,w={spec},dy=mxfp8"
    with rank_of(0, 2) as group:
        mesh, model = DeviceMesh.from_group(group, "cpu"), Linear(64, 1024)
        gather_codes(model, recipe)
        with pytest.warns(UserWarning, match="several rows together .*; its values are gathered instead, in their own"):
            fully_shard(model, mesh=mesh)
        with pytest.warns(UserWarning, match="several rows together .*; its values are gathered instead of codes"):
            shard_weights(Linear(64, 1024), mesh, recipe)


# ------------------------------------------------------------ values


@pytest.mark.parametrize("recipe", SAME_ON_RANKS)
def test_sharded_layers_equal_one_process(two, recipe):
    for kind in KINDS:
        two.run(values_equal_one_process, Case(recipe, kind, outputs=96))


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_shards_equal_replicas(two, recipe):
    two.run(shards_equal_replicas, recipe)


def test_rows_that_do_not_divide_equally_are_those_of_one_process(two):
    two.run(values_equal_one_process, Case("mxfp8", outputs=97))
    two.run(values_equal_one_process, Case("mxfp8", outputs=1, reshard=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "kind", "dim"), pairwise(["high_precision", "mxfp8", "nvfp4_no_sr"], ["own", "torch"], [None, 0])
)
def test_features_and_shards_are_sharded_over_a_mesh(four, recipe, kind, dim):
    four.run(sharded_features_and_rows, kind, dim, recipe)


def test_replicas_of_shards_equal_one_process(four):
    four.run(values_equal_one_process, Case("mxfp8", "norms", mesh=(2, 2)))


# ------------------------------------------------------------ codes in a graph


@pytest.mark.parametrize("recipe", [name for name in TABLE if name != "delayed"])
def test_weights_of_a_graph_give_the_bits_of_fully_shard(two, recipe):
    two.run(weights_of_a_graph_equal_values, Case(recipe, "norms"), 4)


@pytest.mark.parametrize(
    ("case", "sharded", "warned"),
    [
        (Case("mxfp8", outputs=97), 1, 1),
        (Case("fp8_block", outputs=96), 2, 1),
        (Case("mxfp8", "checkpoint"), 4, 0),
        (Case("mxfp8", "grouped"), 0, 0),
        (Case("mxfp8", "mixture"), 0, 0),
        (Case("nvfp4", accumulate=2, mesh=(1,)), 2, 0),
        (Case("nvfp4", backend="aot_eager"), 2, 0),
        pytest.param(Case("mxfp8", "norms", backend="inductor"), 4, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_of_a_graph_with_options(two, case, sharded, warned):
    two.run(weights_of_a_graph_equal_values, case, sharded, warned)


# ------------------------------------------------------------ codes


@pytest.mark.parametrize("recipe", WITH_CODES)
def test_codes_give_the_bits_that_values_give(two, recipe):
    two.run(codes_equal_values, Case(recipe))


@pytest.mark.parametrize(
    "case",
    [
        *[Case(recipe, reshard=False) for recipe in ALL],
        *[Case(recipe, low=True, accumulate=2) for recipe in ALL],
        *[Case(recipe, "norms") for recipe in ("fp8_current", "nvfp4", "delayed")],
        Case("mxfp8", "mixture"),
        Case("mxfp8", "checkpoint"),
        Case("nvfp4", "checkpoint reentrant"),
    ],
    ids=str,
)
def test_codes_give_the_bits_that_values_give_with_options(two, case):
    two.run(codes_equal_values, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("mxfp8", "norms", backend="inductor"), marks=pytest.mark.slow),
        Case("nvfp4", reshard=False, backend="aot_eager"),
        pytest.param(Case("delayed", backend="aot_eager"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_layers_take_gathered_codes(two, case):
    two.run(codes_equal_values, case)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", "delayed"])
def test_codes_with_replicas_and_in_groups_of_one(two, four, recipe):
    four.run(codes_equal_values, Case(recipe, "norms", mesh=(2, 2)))
    two.run(codes_equal_values, Case(recipe, "norms", mesh=(2, 1)))
    two.run(codes_equal_values, Case(recipe, "norms", mesh=(1,)))


@pytest.mark.parametrize("recipe", WITH_CODES)
def test_few_bytes_travel(two, recipe):
    spec = TABLE[recipe].weight_spec
    most = 0.29 if spec.startswith(("mxfp4", "nvfp4")) else 0.53
    for ratios in two.run(linears_share_their_gathers, recipe):
        assert 0 < max(ratios) <= most


def test_both_directions_travel_at_once_where_weights_stay(two):
    """Of two kinds of codes: where one follows from the other, it is not sent."""
    for recipe, directions in (("mxfp8", 2), ("fp8_current", 1), ("fp8_block", 1), ("nvfp4", 1)):
        (_, kept), *_ = two.run(codes_equal_values, Case(recipe, reshard=False))
        (_, resharded), *_ = two.run(codes_equal_values, Case(recipe, reshard=True))
        assert directions - 0.1 < kept[1] / resharded[1] < directions + 0.1


@pytest.mark.parametrize(
    ("recipe", "outputs", "warned"),
    [
        ("mxfp8", 97, 1),
        ("mxfp8", 48, 1),
        ("fp8_block", 384, 1),
        ("nvfp4", 96, 0),
        ("nvfp4", 48, 1),
        ("fp8_current", 98, 0),
        ("fp8_current", 97, 1),
        ("mxfp8", 1, 1),
    ],
)
def test_values_travel_where_codes_of_parts_are_not_those_of_the_whole(two, recipe, outputs, warned):
    two.run(codes_equal_values, Case(recipe, outputs=outputs), warned)


def test_stacked_weights_travel_as_values(two):
    two.run(codes_equal_values, Case("mxfp8", "grouped"), 1)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_no_sr"])
def test_quantized_parameters_become_their_masters(two, recipe):
    two.run(quantized_parameters_have_masters, recipe)


@pytest.mark.parametrize(
    ("recipe", "ways"),
    [
        ("x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8:e5m2", ("values", "codes", "in a graph")),
        ("x=nvfp4:given,w=nvfp4,dy=mxfp8:e5m2", ("codes", "compiled")),
        ("x=nvfp4:given,w=nvfp4,dy=mxfp8:e5m2,backward=dequantized", ("in a graph",)),
    ],
)
def test_static_scales_are_those_of_one_process(two, recipe, ways):
    two.run(static_scales_equal_one_process, recipe, ways)


def test_explanations_keep_nothing_gathered(two):
    two.run(an_explanation_keeps_nothing_gathered)


@pytest.mark.parametrize(("recipe", "amaxes"), [("mxfp8", 0), ("nvfp4", 1)])
def test_explanations_name_gathers_and_change_nothing(two, recipe, amaxes):
    (trained, evaluated, said), other = two.run(explanations_change_nothing, recipe)
    assert trained == other[0]
    amax = ["all_reduce max of float32 [2] over 'default_pg'"] * amaxes
    # Codes for a pass, and a bias, of each linear.
    bits = {"mxfp8": 8 + 8 / 32, "nvfp4": 4 + 8 / 16}[recipe]
    gathers = [
        f"all_gather of uint8 [{int(256 * 256 * bits / 8) + 256 * 4}] over 'default_pg'",
        f"all_gather of uint8 [{int(128 * 512 * bits / 8) + 128 * 4}] over 'default_pg'",
    ]
    sums = [f"reduce_scatter avg of float32 [{256 * 512 + size}] over 'default_pg'" for size in (256, 512)]
    assert evaluated == [each for gather in gathers for each in (*amax, gather)]
    assert trained == [*evaluated, *gathers[::-1], *sums]
    assert said.startswith("explain: ") and said.endswith("pass the module and its arguments")


@pytest.mark.parametrize("reshard", [True, False])
def test_evaluation_between_steps(two, reshard):
    two.run(evaluation_between_steps, reshard)


@pytest.mark.parametrize(
    "function",
    [
        states_are_plain,
        copies_are_prepared_too,
        blocks_may_be_wrapped_before_they_are_sharded,
        models_leave_the_meta_device,
        tied_weights_stay_tied,
        optimizers_update_masters,
        only_what_a_pass_needs_is_there,
        layers_of_a_graph_are_ordinary,
    ],
)
def test_a_prepared_model_is_an_ordinary_one(two, function):
    two.run(function)


def test_what_does_not_go_together_is_refused_in_words(two):
    said, other = two.run(errors)
    assert said == other
    words = {
        "no layers": "convert it with quire.convert first",
        "high precision": "needs weights and not codes",
        "no recipe": "recipe must be a Recipe",
        "after": "before fully_shard",
        "twice": "call gather_codes once",
        "no master": "quantized_model_init(keep_master=True)",
        "quantized": "Call quire.distributed.gather_codes(model, recipe) first",
        "fused": "leave these options out",
        "fused values": "as for fully_shard, whose gathered weights have none",
        "delayed": "make the layer without delay_wgrad_compute",
        "other recipe": "pass one recipe to gather_codes and to autocast",
        "kept False": "quire.distributed.gather_codes",
        "kept True": "quire.distributed.gather_codes",
        "again": "gather_codes(model, recipe, recompute=True)",
        "again, wrapped": "gather_codes(model, recipe, recompute=True)",
        "again, within a layer": "pass recompute=True, or make the layer without checkpoint",
        "again, from the codes of forward": "nothing",
        "again, by an attribute": "gather_codes(model, recipe, recompute=True)",
        "graph twice": "call shard_weights once",
        "graph mesh": "mesh must have one dimension",
        "graph fused": "make the layer without them",
        "graph delayed": "use Float8CurrentScaling, or fully_shard with quire.distributed.gather_codes",
        "graph delayed call": "use Float8CurrentScaling, or fully_shard with quire.distributed.gather_codes",
        "graph microbatch": "leave is_first_microbatch out",
        "graph kept": "outside of a forward pass this rank has a part of it",
        "graph x": "pass x.to_local()",
        "graph codes": "pass x.dequantize()",
        "graph features": "must end with the in_features of w, 256",
    }
    assert said.keys() == words.keys()
    assert {name for name, text in said.items() if words[name] not in text} == set(), said
