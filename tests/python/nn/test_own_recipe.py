"""The recipe of a layer itself, of quire.convert mostly: when it counts, what respects it, in graphs too."""

import copy
import pickle

import pytest
import torch

import quire
from every_feature import LAYERS
from quire import recipe as recipes
from steps import assert_of_codes, blocks

pytestmark = pytest.mark.any_device

NVFP4 = recipes.NVFP4BlockScaling()


def bits(tensor):
    return tensor.detach().clone().view(torch.int32)


def test_a_layer_runs_under_its_own_recipe_without_an_autocast():
    layer, x = torch.nn.Linear(256, 512), torch.randn(16, 256)
    high = layer(x).detach()
    for recipe in (recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling(), NVFP4):
        with torch.no_grad():
            y = quire.convert(layer, recipe)(x)
        assert_of_codes(y, layer, x, recipe)
        assert not torch.equal(y, high)


def test_an_autocast_decides_over_the_own_recipe_and_no_recipe_is_high_precision():
    own, none, plain = blocks(), blocks(), blocks()
    quire.convert(own, NVFP4)
    quire.convert(none)
    x = torch.randn(16, 256)

    def run(model, *autocast, **options):
        with torch.no_grad():
            if not autocast and not options:
                return bits(model(x))
            with quire.autocast(*autocast, **options):
                return bits(model(x))

    mxfp8 = recipes.MXFP8BlockScaling()
    high = run(plain)
    assert torch.equal(run(none), high) and not torch.equal(run(own), high)
    assert torch.equal(run(own, False), high)
    assert torch.equal(run(own, recipe=mxfp8), run(none, recipe=mxfp8))
    assert torch.equal(run(own, recipe=NVFP4), run(own))
    with quire.autocast(False):
        with quire.autocast(recipe=mxfp8):
            assert torch.equal(run(own), run(none, recipe=mxfp8))
        assert torch.equal(run(own), high)
    assert not torch.equal(run(own), high)  # left, it is its own again


def test_converting_again_gives_layers_another_recipe():
    model = quire.convert(blocks(), NVFP4)
    quire.convert(model, "mxfp8", lambda module, name: name.endswith("up"))
    assert [type(layer.recipe).__name__ for layer in model[0].children()] == ["MXFP8BlockScaling", "NVFP4BlockScaling"]
    with pytest.raises(ValueError, match="it is a quire.Linear already"):
        quire.convert(model)


def test_weights_are_quantized_once_under_the_layers_own_recipes():
    model = quire.convert(blocks(), NVFP4)
    quire.convert(model, "mxfp8", lambda module, name: name.endswith("up"))
    x = torch.randn(4, 256)
    with torch.no_grad():
        y = bits(model(x))
        quire.quantize_weights(model)
        assert [layer.kept_weight.spec for layer in model[0].children()] == ["mxfp8:nan", "nvfp4:16x16:nan"]
        assert torch.equal(bits(model(x)), y)
        explained = quire.explain(model, x)
    assert all("given quantized" in str(step) for step in explained.products)
    model[0].up.weight.data.add_(1)
    with pytest.raises(RuntimeError, match="quantize_weights"), torch.no_grad():
        model(x)
        quire.synchronize()  # kernels of a device say then which weights they refuse


def test_quantize_weights_follows_an_optimizer_under_own_recipes():
    model = quire.convert(blocks(1), NVFP4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quire.quantize_weights(model, optimizer=optimizer)
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.randn(4, 256))  # codes of the old weight would be refused


@pytest.mark.cpu_only
@pytest.mark.parametrize("make", [lambda r: quire.Linear(8, 8, recipe=r), lambda r: quire.convert(blocks(), r)])
def test_an_own_recipe_is_a_recipe_and_not_delayed_scaling(make):
    with pytest.raises(ValueError, match="DelayedScaling, whose scales change on entering"):
        make(recipes.DelayedScaling())
    with pytest.raises(TypeError, match="must be a recipe of quire.recipe.*got 3"):
        make(3)


def test_a_linear_made_with_a_recipe_runs_under_it():
    torch.manual_seed(2)
    layer, x = quire.Linear(256, 512, recipe=NVFP4), torch.randn(16, 256)
    with torch.no_grad():
        assert_of_codes(layer(x), layer, x, NVFP4)
    assert f"recipe=NVFP4BlockScaling('{NVFP4.linear_spec()}')" in repr(layer)


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in ("MoE", "converted")])
def test_what_is_assigned_as_the_recipe_is_checked_then(kind):
    layer = LAYERS[kind]()
    for given in ("mxfp8", "x=none,w=nvfp4:16x16,dy=none", NVFP4):
        layer.recipe = given
        assert layer.recipe == recipes.as_recipe("test", given)
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    for wrong, error in (("mxfp9", ValueError), (3, TypeError), (recipes.DelayedScaling(), ValueError)):
        with pytest.raises(error, match=rf"quire.{type(layer).__name__}.recipe: "):
            layer.recipe = wrong
    assert all(one.recipe == NVFP4 for one in (layer, *copies)) and "recipe=NVFP4BlockScaling" in repr(layer)


def test_delayed_scaling_comes_from_autocast():
    model = quire.convert(blocks())
    for _ in range(2):
        with quire.autocast(recipe=recipes.DelayedScaling(amax_history_len=2)):
            y = model(torch.randn(16, 256))
        y.sum().backward()
    assert model[0].up.delayed.fwd_scale[0] != 1


# ---------------------------------------------------------------- compiled


def test_a_converted_model_compiles_whole_and_gives_eagers_bits(compiler):
    model, x = quire.convert(blocks(), NVFP4), torch.randn(16, 256)
    compiled = compiler(model)
    results = []
    for function in (model, compiled):
        model.zero_grad()
        quire.set_rng_state(model, {name: torch.tensor([7, 0]) for name in quire.rng_state(model)})
        y = function(x)
        y.sum().backward()
        results.append([bits(y), *(bits(p.grad) for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert compiler.graphs == 1


def test_what_was_compiled_before_runs_converted_after(compiler):
    model, x = blocks(), torch.randn(16, 256)
    compiled = compiler(model)
    with torch.no_grad():
        high = bits(compiled(x))
        quire.convert(model, NVFP4)
        assert torch.equal(bits(compiled(x)), bits(model(x))) and not torch.equal(bits(compiled(x)), high)


def test_compiled_code_follows_an_assigned_text(compiler):
    model, x = quire.Linear(256, 512), torch.randn(16, 256)
    compiled = compiler(model)
    with torch.no_grad():
        for recipe in ("mxfp8", "nvfp4", None):
            model.recipe = recipe
            assert_of_codes(compiled(x), model, x)


def test_compiled_code_follows_autocast_and_another_recipe(compiler):
    model, x = quire.convert(blocks(), NVFP4), torch.randn(16, 256)
    compiled = compiler(model)

    def both():
        with torch.no_grad():
            y = bits(compiled(x))
            assert torch.equal(y, bits(model(x)))
        return y

    first = both()
    with quire.autocast(False):
        assert not torch.equal(both(), first)
    quire.convert(model, "mxfp8")
    assert not torch.equal(both(), first)
    quire.convert(model, NVFP4)
    assert torch.equal(both(), first)
