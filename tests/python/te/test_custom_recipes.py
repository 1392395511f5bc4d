"""CustomRecipe with quantizers: a function chooses one by what is quantized, and a layer computes as under the recipe
that quantizes like these."""

import copy
import dataclasses
import pickle

import pytest
import torch
from quire.te.recipe import CustomRecipe, Format

import pytorch
import quire
import quire.te as te
from quire import recipe as recipes
from steps import same

pytestmark = pytest.mark.any_device

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2


def current(role):
    return te.Float8CurrentScalingQuantizer(E5M2 if role.tensor_type == "grad_output" else E4M3, "cpu")


def block(role):
    return te.Float8BlockQuantizer(E4M3, block_scaling_dim=2 if role.tensor_type == "weight" else 1)


def nvfp4(role):
    if role.tensor_type == "weight":
        return te.NVFP4Quantizer(with_2d_quantization=True)
    stochastic = role.tensor_type == "grad_output"
    return te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=stochastic)


def older(role):
    """TransformerEngine's roles were texts before they were objects."""
    names = {"linear_input": E4M3, "linear_weight": E4M3, "linear_grad_output": E5M2}
    return te.MXFP8Quantizer(names[role] if role.startswith("linear") else E4M3)


def mxfp8(role):
    return te.MXFP8Quantizer(E4M3)


FACTORIES = {
    "current": (current, recipes.Float8CurrentScaling()),
    "block": (block, recipes.Float8BlockScaling()),
    "mxfp8": (mxfp8, recipes.MXFP8BlockScaling()),
    "nvfp4": (nvfp4, recipes.NVFP4BlockScaling()),
    "texts of specs": (
        lambda role: "mxfp4:nan" if role.tensor_type == "weight" else "mxfp8:nan",
        recipes.as_recipe("", "x=mxfp8:nan,w=mxfp4:nan,dy=mxfp8:nan"),
    ),
    "older": (older, recipes.as_recipe("", "x=mxfp8:nan,w=mxfp8:nan,dy=mxfp8:e5m2:nan")),
    "weights only": (
        lambda role: te.MXFP8Quantizer(E4M3) if role.tensor_type == "weight" else None,
        recipes.as_recipe("", "x=none,w=mxfp8:nan"),
    ),
}


def result(recipe, layer, x):
    """y, dx and the gradients of parameters."""
    layer.zero_grad()
    for state in layer.sr_states().values():
        state[1] = 0
    x = x.detach().requires_grad_()
    with te.autocast(recipe is not None, recipe=recipe):
        y = layer(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *[parameter.grad for parameter in layer.parameters()]]


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return quire.Linear(64, 32, name="first")


@pytest.fixture
def x():
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("factory", "meant"), FACTORIES.values(), ids=FACTORIES)
def test_a_layer_computes_as_under_the_recipe_of_the_same_specs(factory, meant, layer, x):
    recipe = CustomRecipe(qfactory=factory)
    assert recipe.custom() and recipe.qfactory is factory
    found, expected = result(recipe, layer, x), result(meant, layer, x)
    assert same(found, expected)
    other = recipes.NVFP4BlockScaling() if meant != recipes.NVFP4BlockScaling() else recipes.MXFP8BlockScaling()
    assert not same(found, result(other, layer, x))


@pytorch.takes_objects
@pytest.mark.parametrize("named", [False, True])
def test_a_compiled_function_asks_the_factory_of_a_recipe_that_nobody_has_read(named, layer, x, compiler):
    recipe = CustomRecipe(by_name if named else mxfp8)

    def call(x):
        with te.autocast(recipe=recipe):
            return layer(x)

    compiled = compiler(call)
    for factory, meant in ((recipe.qfactory, recipes.MXFP8BlockScaling()), (current, recipes.Float8CurrentScaling())):
        recipe.qfactory = factory
        with te.autocast(recipe=meant):
            expected = layer(x)
        for _ in range(2):
            assert torch.equal(compiled(x), expected)
    assert compiler.graphs == 2


@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
def test_the_backward_override_is_that_of_the_recipe(override, layer, x):
    recipe = CustomRecipe(mxfp8, backward_override=override)
    assert same(result(recipe, layer, x), result(recipes.MXFP8BlockScaling(backward_override=override), layer, x))


def test_a_factory_that_is_set_is_asked_in_the_next_step(layer, x, compiler):
    recipe, compiled = CustomRecipe(mxfp8), compiler(layer)

    def call():
        with te.autocast(recipe=recipe), torch.no_grad():
            return compiled(x)

    before = call()
    recipe.qfactory = current
    with te.autocast(recipe=recipes.Float8CurrentScaling()), torch.no_grad():
        assert torch.equal(call(), layer(x))
    assert not torch.equal(call(), before)


def test_a_request_is_delayed_scaling_with_its_fields(x):
    fields = {"margin": 1, "amax_history_len": 3, "amax_compute_algo": "most_recent", "fp8_format": Format.E4M3}

    def train(recipe):
        torch.manual_seed(0)
        layer, found = quire.Linear(64, 32), []
        for step in range(4):
            found += result(recipe, layer, x * 2.0**-step)
        return found

    found = train(CustomRecipe(lambda role: te.DelayedScalingRequest(**fields)))
    assert same(found, train(recipes.DelayedScaling(**fields)))
    assert not same(found, train(recipes.DelayedScaling()))


def by_name(role):
    if role.name.startswith("first"):
        return mxfp8(role)
    return te.IdentityQuantizer() if role.name.startswith("plain") else current(role)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytorch.takes_objects)])
def test_a_factory_that_reads_names_gives_each_layer_its_own_quantizers(compiled, x, compiler):
    recipe = CustomRecipe(by_name)
    expected = {
        "first": recipes.MXFP8BlockScaling(),
        "plain": None,
        "other": recipes.Float8CurrentScaling(),
        None: recipes.Float8CurrentScaling(),
    }
    makers = [quire.Linear, quire.LayerNormLinear, lambda n, m, name: quire.LayerNormMLP(n, m, name=name)]
    for make in makers[:1] if compiled else makers:
        for name, meant in expected.items():
            torch.manual_seed(0)
            layer = make(64, 64, name=name)
            if not compiled:
                assert same(result(recipe, layer, x), result(meant, layer, x))
                continue
            with te.autocast(recipe=recipe):
                y = compiler(layer)(x)
            with te.autocast(meant is not None, recipe=meant):
                assert torch.equal(y, layer(x))


@pytorch.takes_objects
def test_a_compiled_layer_does_not_go_on_with_another_recipe_of_that_kind(x, layer, compiler):
    compiled = compiler(layer)
    for factory in (by_name, lambda role: nvfp4(role) if role.name == "first" else None, by_name):
        with te.autocast(recipe=CustomRecipe(factory)), torch.no_grad():
            y = compiled(x)
            assert torch.equal(y, layer(x))
        meant = recipes.MXFP8BlockScaling() if factory is by_name else recipes.NVFP4BlockScaling()
        with te.autocast(recipe=meant), torch.no_grad():
            assert torch.equal(y, layer(x))


def test_layers_of_groups_have_a_role_of_their_own(x):
    def factory(role):
        return mxfp8(role) if role.module_type == "grouped_linear" else current(role)

    torch.manual_seed(0)
    grouped, linear = quire.GroupedLinear(2, 64, 32), quire.Linear(64, 32)
    recipe, sizes = CustomRecipe(factory), [3, 5]
    with te.autocast(recipe=recipe):
        found = grouped(x, sizes), linear(x)
    with te.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert torch.equal(found[0], grouped(x, sizes))
    with te.autocast(recipe=recipes.Float8CurrentScaling()):
        assert torch.equal(found[1], linear(x))


@pytest.mark.parametrize("own", ["linear", "grouped_linear"])
def test_a_factory_for_one_type_of_layers_may_raise_for_the_other(own, x):
    def factory(role):
        assert role.module_type == own, f"no {role.module_type} here"
        return mxfp8(role)

    layers = {"linear": (quire.Linear(64, 32), ()), "grouped_linear": (quire.GroupedLinear(1, 64, 32), ([8],))}
    layer, arguments = layers.pop(own)
    ((other, of_other),) = layers.values()
    with te.autocast(recipe=CustomRecipe(factory)):
        y = layer(x, *arguments)
        with pytest.raises(AssertionError, match="no .*linear here"):
            other(x, *of_other)
    with te.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert torch.equal(y, layer(x, *arguments))


def test_names_of_a_transformer_layer_reach_the_factory():
    names = set()

    def factory(role):
        names.add(role.name)
        return mxfp8(role)

    layer = te.TransformerLayer(64, 64, 4, layer_type="decoder", name="block").eval()
    x = torch.randn(4, 2, 64)
    with te.autocast(recipe=CustomRecipe(factory)), torch.no_grad():
        y = layer(x, encoder_output=x)
    attention = {f"block.inter_attention.{part}" for part in ("layernorm_linear_q", "linear_kv", "proj")}
    attention |= {f"block.self_attention.{part}" for part in ("layernorm_linear_qkv", "proj")}
    assert names == {"", *attention, "block.layernorm_mlp.fc1", "block.layernorm_mlp.fc2"}
    with te.autocast(recipe=recipes.MXFP8BlockScaling()), torch.no_grad():
        assert torch.equal(y, layer(x, encoder_output=x))


def test_high_precision_for_all_is_no_quantization(layer, x):
    for nothing in (None, te.IdentityQuantizer()):
        recipe = CustomRecipe(lambda role, nothing=nothing: nothing)
        assert same(result(recipe, layer, x), result(None, layer, x))
        assert "another one for each layer" in str(explained(recipe, layer, x))
    assert te.IdentityQuantizer().quantize(x) is te.IdentityQuantizer()(x) is x


def explained(recipe, layer, x):
    with te.autocast(recipe=recipe):
        return quire.explain(layer, x)


@pytest.mark.cpu_only
def test_a_role_is_a_value_and_a_text():
    role = te.QuantizerRole("linear", "weight", name="first")
    assert (role.module_type, role.tensor_type, role.name) == ("linear", "weight", "first")
    assert role == "linear_weight" and {"linear_weight": 3}[role] == 3 and role != "linear_input"
    assert role == te.QuantizerRole("linear", "weight", "first") != te.QuantizerRole("linear", "weight")
    assert (
        str(role) == "module_type=linear|tensor_type=weight|name=first" and str(te.QuantizerRole()) == "QuantizerRole()"
    )
    for other in (pickle.loads(pickle.dumps(role)), copy.deepcopy(role), dataclasses.replace(role)):
        assert other == role and other.name == "first" and other == "linear_weight"
    with pytest.raises(dataclasses.FrozenInstanceError):
        role.name = "second"
    assert te.DelayedScalingRequest() == te.DelayedScalingRequest(Format.HYBRID, 0, 1024, "max", None, True)
    assert isinstance(te.DelayedScalingRequest(), te.QuantizerRequest)


def test_the_alignment_is_what_the_recipe_says():
    from quire.te.pytorch.quantization import get_align_size_for_quantization

    asked = []

    def factory(role):
        asked.append(role)
        return mxfp8(role)

    assert get_align_size_for_quantization(CustomRecipe(factory)) == 128
    recipe = CustomRecipe(factory, quantization_alignment=32)
    assert get_align_size_for_quantization(recipe) == 32 and not asked
    padding = te.Fp8Padding(1)
    with te.autocast(recipe=recipe):
        assert padding.align_size == 32
        assert padding(torch.ones(3, 32), [3])[1] == [32]
    assert padding.align_size == get_align_size_for_quantization(te.get_default_recipe())
    recipe.quantization_alignment = 0
    with pytest.raises(ValueError, match="quantization_alignment must be positive"), te.autocast(recipe=recipe):
        pass


def test_a_recipe_survives_pickle_and_deepcopy(layer, x):
    for factory in (mxfp8, by_name):
        recipe = CustomRecipe(factory)
        expected = result(recipe, layer, x)
        for other in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
            assert other == recipe and other.qfactory is factory and same(result(other, layer, x), expected)


def mixed(role):
    return (
        te.DelayedScalingRequest(margin=int(role.tensor_type == "weight")) if role.tensor_type != "input" else "mxfp8"
    )


def delayed_by_name(role):
    return te.DelayedScalingRequest() if role.name == "first" else current(role)


def read(*args, **fields):
    return CustomRecipe(*args, **fields).frozen()


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda: CustomRecipe("mxfp8"), TypeError, "qfactory must be callable with a QuantizerRole; got 'mxfp8'"),
        (lambda: read(lambda role: 3), TypeError, "or None for high precision; got 3 for module_type=linear"),
        (lambda: read(lambda role: "mxfp9"), ValueError, "unknown family in '>>mxfp9<<'"),
        (
            lambda: CustomRecipe(mxfp8, quantization_alignment=0),
            ValueError,
            "must be positive, an int of at least 1; got 0",
        ),
        (lambda: read(mxfp8, fp8_dpa=True), NotImplementedError, "CustomRecipe: fp8_dpa and fp8_mha"),
        (lambda: read(mixed), NotImplementedError, "tensors of a matmul must be equal: .*margin=1.*margin=0"),
        (
            lambda: read(lambda role: None if role.tensor_type == "weight" else mxfp8(role)),
            NotImplementedError,
            "got mxfp8:nan for input, none for weight, mxfp8:nan for grad_output. Return a quantizer for the weight",
        ),
        (
            lambda: read(lambda role: None if role.tensor_type == "input" else mxfp8(role)),
            ValueError,
            "quantizes one of x and dy only; give both a spec, or both none",
        ),
        (
            lambda: quire.Linear(64, 32, recipe=CustomRecipe(by_name)),
            NotImplementedError,
            "quire.Linear: the recipe differs by layer, which only quire.autocast takes",
        ),
    ],
)
def test_what_no_recipe_can_do_is_refused_in_words(act, error, words):
    with pytest.raises(error, match=words):
        act()


@pytorch.takes_objects
def test_what_a_layer_cannot_do_is_refused_in_words(x, compiler):
    recipe = CustomRecipe(delayed_by_name)

    def call(x, layer):
        with te.autocast(recipe=recipe):
            return layer(x)

    with pytest.raises(Exception, match="autocast whose recipe differs by layer; enter it outside of the compiled"):
        compiler(call)(x, quire.Linear(64, 32, name="first"))
    with pytest.raises(NotImplementedError, match="quantized_model_init: the recipe differs by layer"):
        te.quantized_model_init(recipe=CustomRecipe(by_name)).__enter__()
