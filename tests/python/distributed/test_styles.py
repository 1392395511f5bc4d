"""Layers that PyTorch's parallelize_module has sharded over two processes, compared with one process."""

import copy
import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import quire
from every_recipe import STATIC, TABLE
from pairwise import each_value, pairwise
from python.distributed.parallel_layers import OPTIONS, WAYS, Case
from python.distributed.style_ranks import (
    STYLES,
    all_ways_give_the_same,
    block_equals_one_process,
    layer_equals_one_process,
)
from quire.distributed import ColumnParallel, RowParallel
from ranks import rank_of

SHARDED = list(itertools.product(("column", "row"), (False, True)))
#: One for each way in which scales follow from a tensor, and for the random stream.
SOME = ("high_precision", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed")
FEW = ("high_precision", "mxfp8", "nvfp4")


# The operator has the full cross in test_linear.py. Of a style only the way of scales may differ.
@pytest.mark.parametrize(
    ("recipe", "sharded", "style"),
    sorted(
        {
            *pairwise(SOME, SHARDED, list(STYLES)),
            *(
                (recipe, *way)
                for recipe, way in each_value([*TABLE, *STATIC], list(itertools.product(SHARDED, STYLES)))
            ),
        }
    ),
)
def test_results_are_those_of_one_process(two, recipe, sharded, style):
    mode, sequence = sharded
    # Of two processes each: whole blocks, blocks that both share, one token, none, three dimensions.
    for tokens in ((256,), (14,), (2,), (0,), (6, 5)):
        two.run(layer_equals_one_process, style, Case(recipe, "Linear", mode, sequence, tokens))


@pytest.mark.parametrize(
    ("recipe", "way", "sharded", "style"),
    [
        (SOME[i % len(SOME)], *row)
        for i, row in enumerate(pairwise([way for way in WAYS if way != "eager"], SHARDED, list(STYLES)))
    ],
)
def test_other_ways_to_run_a_layer(two, recipe, way, sharded, style):
    mode, sequence = sharded
    two.run(layer_equals_one_process, style, Case(recipe, "Linear", mode, sequence, way=way))


@pytest.mark.parametrize(
    ("recipe", "way", "kind", "sequence"),
    pairwise(SOME, ["eager", "compiled"], ["LayerNormLinear", "LayerNormMLP"], [False, True]),
)
def test_layers_with_a_norm(two, recipe, way, kind, sequence):
    for tokens in ((64,), (14,)) if way == "eager" else ((14,),):
        two.run(layer_equals_one_process, "own", Case(recipe, kind, "column", sequence, tokens, way=way))


@pytest.mark.parametrize(
    ("option", "sharded", "style", "recipe"), pairwise(range(len(OPTIONS)), SHARDED, list(STYLES), FEW)
)
def test_options_of_the_layer(two, option, sharded, style, recipe):
    two.run(layer_equals_one_process, style, Case(recipe, "Linear", *sharded, options=OPTIONS[option]))


@pytest.mark.parametrize(
    ("dtype", "sharded", "style", "recipe"), pairwise((torch.bfloat16, torch.float16), SHARDED, list(STYLES), FEW)
)
def test_dtypes(two, dtype, sharded, style, recipe):
    two.run(layer_equals_one_process, style, Case(recipe, "Linear", *sharded, dtype=dtype))


@pytest.mark.parametrize(("recipe", "dim"), [*((name, 0) for name in SOME), ("nvfp4", 1), ("delayed", None)])
def test_converting_first_or_last_and_either_style_give_the_same_model(two, recipe, dim):
    two.run(all_ways_give_the_same, recipe, dim)


@pytest.mark.parametrize(
    ("style", "dim", "norm", "recipe"),
    pairwise(list(STYLES), (None, 0, 1), (torch.nn.LayerNorm, quire.LayerNorm, quire.RMSNorm), FEW),
)
def test_a_block_of_a_model_is_that_of_one_process(two, style, dim, norm, recipe):
    two.run(block_equals_one_process, recipe, (style, dim), norm, None)


@pytest.mark.parametrize(("style", "dim", "recipe"), pairwise(list(STYLES), [None, 0, 1], ["high_precision", "mxfp8"]))
def test_a_compiled_block_of_a_model_is_that_of_one_process(two, style, dim, recipe):
    two.run(block_equals_one_process, recipe, (style, dim), quire.LayerNorm, {"backend": "aot_eager"})


@pytest.fixture
def fake_mesh():
    with rank_of(0, 2):
        yield init_device_mesh("cpu", (2,))


def test_what_cannot_be_sharded_is_refused_and_stays_as_it_is(fake_mesh):
    for make, error, words in (
        (lambda: quire.Linear(256, 255), ValueError, "multiple of the 2 ranks"),
        (lambda: quire.LayerNormMLP(256, 256, activation="swiglu"), NotImplementedError, "each half of fc1"),
        (lambda: quire.GroupedLinear(2, 256, 256), NotImplementedError, "cannot be sharded over ranks"),
        (lambda: torch.nn.LayerNorm(256), NotImplementedError, "only layers with a weight"),
    ):
        layer = make()
        with pytest.raises(error, match=words):
            parallelize_module(layer, fake_mesh, ColumnParallel())
        assert not any(isinstance(parameter, DTensor) for parameter in layer.parameters())
    with quire.quantized_model_init(recipe="mxfp8"):
        layer = quire.Linear(256, 256)
    for style in (ColumnParallel(), RowParallel(), ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(
            (NotImplementedError, TypeError), match="must be a plain parameter|would write to a Quantized"
        ):
            parallelize_module(layer, fake_mesh, style)
        assert isinstance(layer.weight, quire.QuantizedTensor) and layer.parallel is None


@pytest.mark.parametrize("style", [ColumnParallel, RowParallel])
@pytest.mark.parametrize("reduce", ["foo", "nvfp4:sr", "fp8_tensor:given"])
def test_a_style_whose_sum_is_no_spec_is_refused_before_it_shards(style, reduce):
    with pytest.raises(ValueError, match=f"^{style.__name__}: reduce must be '', 'float32' or a spec .* '{reduce}'"):
        style(reduce=reduce)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"is_first_microbatch": 1}, TypeError),
        ({"fp8_output": 1}, TypeError),
        ({"fp8_grad": 3}, TypeError),
        ({"output_spec": "rubbish"}, ValueError),
        ({"output_spec": "nvfp4:sr"}, ValueError),
    ],
    ids=str,
)
def test_options_of_a_call_with_a_dtensor_are_looked_at(fake_mesh, option, error):
    layer = distribute_module(quire.Linear(32, 32), fake_mesh)
    x = distribute_tensor(torch.ones(4, 32), fake_mesh, [Replicate()], src_data_rank=None)
    with pytest.raises(error, match=f"{next(iter(option))} must be a bool|unknown family|rounds stochastically"):
        layer(x, **option)


def test_copies_moves_and_state_of_a_sharded_layer(fake_mesh):
    layer = parallelize_module(quire.Linear(256, 256, device="meta"), fake_mesh, ColumnParallel())
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(layer.weight.to_local(), torch.nn.Linear(256, 256).weight[:128])
    other = copy.deepcopy(layer).to(torch.bfloat16)
    assert other.weight.dtype == torch.bfloat16 and "column,group=" in repr(other)
    other.float().load_state_dict(layer.state_dict())
    assert torch.equal(other.weight.to_local(), layer.weight.to_local())
    assert other(torch.randn(4, 256)).shape == (4, 128)


#: What calls operators without a layer, with one sharded tensor.
OPERATORS = {
    "quantize": lambda t: quire.quantize(t, "mxfp8"),
    "amax": lambda t: quire.amax(t, "nvfp4"),
    "activation": lambda t: quire.functional.activation(t, "gelu", t.dtype),
    "linear": lambda t: quire.functional.linear(torch.ones(3, 64), t, None, "x=mxfp8,w=mxfp8", torch.float32),
    "runner_register_linear": lambda t: quire.runners.register(quire.runners.LinearRunner(t)),
    "nvfp4_linear": lambda t: quire.nvfp4_linear(t.bfloat16(), 1, 32),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_refuse_a_dtensor_in_words(fake_mesh, name):
    t = distribute_tensor(torch.ones(32, 64), fake_mesh, [Shard(0)])
    with pytest.raises(
        NotImplementedError, match=rf"{name}: an argument is a DTensor with \(Shard\(dim=.*t.to_local\(\)"
    ):
        OPERATORS[name](t)
