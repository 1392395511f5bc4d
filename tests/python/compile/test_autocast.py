"""Recipes and quire.autocast inside and around compiled functions."""

import threading

import pytest
import torch

import pytorch
import quire
from quire.autocast import active_recipe
from quire.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    from_name,
)


@pytest.fixture
def layer():
    torch.manual_seed(1)
    return quire.Linear(32, 32)


@pytest.fixture
def x():
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(0))


CONSTRUCTIONS = {
    "current": lambda: Float8CurrentScaling(),
    "current with fields": lambda: Float8CurrentScaling(True, Format.E4M3, fp8_gemm_fprop=MMParams(True)),
    "block": lambda: Float8BlockScaling(),
    "block with fields": lambda: Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1, use_f32_scales=True),
    "mxfp8": lambda: MXFP8BlockScaling(),
    "mxfp8 with fields": lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    "nvfp4": lambda: NVFP4BlockScaling(),
    "nvfp4 with fields": lambda: NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
    "by name": lambda: from_name("nvfp4"),
    "custom text": lambda: CustomRecipe(lambda role: "mxfp8:e5m2" if role == "dy" else "mxfp8"),
    "custom spec": lambda: CustomRecipe(qfactory=lambda role: quire.QuantSpec("fp8_row")),
    "default": lambda: None,
}


@pytest.mark.parametrize("make", CONSTRUCTIONS.values(), ids=CONSTRUCTIONS)
def test_recipes_may_be_constructed_while_tracing(make, layer, x, compiler, equal_bits):
    def function(x):
        with quire.autocast(recipe=make()):
            return layer(x)

    assert equal_bits(compiler(function)(x), function(x))
    assert compiler.graphs == 1 and active_recipe() is None


def test_autocasts_nest_inside_a_compiled_function(layer, x, compiler, equal_bits):
    def function(x):
        with quire.autocast(recipe=MXFP8BlockScaling()):
            x = layer(x)
            with quire.autocast(recipe=NVFP4BlockScaling()):
                x = layer(x)
            with quire.autocast(enabled=False):
                x = layer(x)
            x = layer(x)
        return layer(x)

    assert equal_bits(compiler(function)(x), function(x))
    assert compiler.graphs == 1 and active_recipe() is None


def test_an_exception_caught_while_tracing_restores_the_recipe(layer, x, compiler, equal_bits):
    def function(x):
        try:
            with quire.autocast():
                x = layer(x)
                raise ValueError
        except ValueError:
            pass
        return layer(x)

    assert equal_bits(compiler(function)(x), function(x))
    assert active_recipe() is None


def test_an_exception_out_of_a_compiled_function_restores_the_recipe(layer, x, compiler):
    def function(x):
        with quire.autocast(recipe=NVFP4BlockScaling()):
            layer(x)
            raise ValueError("the reason")

    with quire.autocast() as outer:
        with pytest.raises(Exception, match="the reason"):
            compiler(function)(x)
        assert active_recipe() is outer.recipe
    assert active_recipe() is None


def test_it_decorates_inside_around_and_on_compiled_functions(layer, x, compiler, equal_bits):
    decorate = quire.autocast(recipe=MXFP8BlockScaling())
    expected = decorate(layer)(x)
    assert equal_bits(compiler(decorate(layer.forward))(x), expected)
    assert equal_bits(decorate(compiler(layer))(x), expected)
    assert equal_bits(compiler(lambda x: quire.autocast(recipe=MXFP8BlockScaling())(layer)(x))(x), expected)


def test_around_a_compiled_function_there_is_one_graph_per_distinct_recipe_and_grad_mode(
    layer, x, compiler, equal_bits
):
    compiled = compiler(layer)
    makers = [Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling]
    for _ in range(3):
        for make in makers:
            with quire.autocast(recipe=make()):  # equal recipes, not the same object
                assert equal_bits(compiled(x), layer(x))
        assert equal_bits(compiled(x), layer(x))
    assert compiler.graphs == len(makers) + 1
    for make in makers:
        with torch.no_grad(), quire.autocast(recipe=make()):
            assert equal_bits(compiled(x), layer(x))
    assert compiler.graphs == 2 * len(makers) + 1


def test_recipes_of_one_text_share_a_graph(layer, x, compiler):
    compiled = compiler(layer)
    for recipe in (Float8CurrentScaling(), Float8CurrentScaling(fp8_gemm_fprop=MMParams(True))):
        with quire.autocast(recipe=recipe):
            compiled(x)
    assert compiler.graphs == 1


def test_threads_do_not_see_each_others_recipe(layer, x, compiler, equal_bits):
    compiled, seen = compiler(layer), []
    plain = layer(x)
    with quire.autocast(recipe=NVFP4BlockScaling()):
        quantized = compiled(x)
        thread = threading.Thread(target=lambda: seen.append(compiled(x)))
        thread.start()
        thread.join()
    assert equal_bits(seen[0], plain) and not equal_bits(quantized, plain)


def test_a_refused_field_shows_its_words_through_the_compiler(layer, x, compiler):
    def function(x):
        with quire.autocast(recipe=MXFP8BlockScaling(margin=3)):
            return layer(x)

    with pytest.raises(Exception, match="margin belongs to delayed scaling and has no meaning here; got 3. Leave it 0"):
        compiler(function)(x)
    assert active_recipe() is None


def test_a_context_made_outside_is_entered_inside_or_refused(layer, x, compiler, equal_bits):
    context = quire.autocast(recipe=MXFP8BlockScaling())

    def function(x):
        with context:
            return layer(x)

    if pytorch.is_before("2.14"):  # only as a decorator
        with pytest.raises(Exception, match="Dynamo does not know how to enter"):
            compiler(function)(x)
    else:
        y = compiler(function)(x)
        assert equal_bits(y, function(x)) and not equal_bits(y, layer(x))
