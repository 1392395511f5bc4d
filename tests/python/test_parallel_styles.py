"""Layers that PyTorch's parallelize_module has divided over two processes, compared with one process."""

import itertools

import pytest
import torch

import quire
from every_recipe import TABLE
from parallel_layers import WAYS, Case
from ranks import Ranks
from style_ranks import STYLES, all_ways_give_the_same, block_equals_one_process, layer_equals_one_process

DIVIDED = list(itertools.product(("column", "row"), (False, True)))
#: One for each way in which scales follow from a tensor, and for the random stream.
SOME = ("high_precision", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed")


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize("recipe", TABLE)
def test_results_are_those_of_one_process(two, recipe, mode, sequence, style):
    # Of two processes each: whole blocks, blocks that both share, one token, none, three dimensions.
    for tokens in ((256,), (14,), (2,), (0,), (6, 5)):
        two.run(layer_equals_one_process, style, Case(recipe, "Linear", mode, sequence, tokens))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "eager"])
@pytest.mark.parametrize("recipe", SOME)
def test_other_ways_to_run_a_layer(two, recipe, way, mode, sequence, style):
    two.run(layer_equals_one_process, style, Case(recipe, "Linear", mode, sequence, way=way))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("recipe", SOME)
def test_layers_with_a_norm(two, recipe, way, kind, sequence):
    for tokens in ((64,), (14,)):
        two.run(layer_equals_one_process, "own", Case(recipe, kind, "column", sequence, tokens, way=way))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"save_original_input": True},
        {"fuse_wgrad_accumulation": True},
        {"delay_wgrad_compute": True},
        {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_of_the_layer(two, options, mode, sequence, style):
    for recipe in ("high_precision", "nvfp4", "mxfp8"):
        two.run(layer_equals_one_process, style, Case(recipe, "Linear", mode, sequence, options=options))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("mode", "sequence"), DIVIDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(two, dtype, mode, sequence, style):
    for recipe in ("high_precision", "nvfp4", "mxfp8"):
        two.run(layer_equals_one_process, style, Case(recipe, "Linear", mode, sequence, dtype=dtype))


@pytest.mark.parametrize(("recipe", "dim"), [*((name, 0) for name in SOME), ("nvfp4", 1), ("delayed", None)])
def test_converting_first_or_last_and_either_style_give_the_same_model(two, recipe, dim):
    two.run(all_ways_give_the_same, recipe, dim)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, quire.LayerNorm, quire.RMSNorm])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("style", STYLES)
def test_a_block_of_a_model_is_that_of_one_process(two, style, dim, norm):
    for recipe in ("high_precision", "mxfp8", "nvfp4"):
        two.run(block_equals_one_process, recipe, (style, dim), norm, None)


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("style", STYLES)
def test_a_compiled_block_of_a_model_is_that_of_one_process(two, style, dim):
    for recipe in ("high_precision", "mxfp8"):
        two.run(block_equals_one_process, recipe, (style, dim), quire.LayerNorm, {"backend": "aot_eager"})
