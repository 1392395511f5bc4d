"""Recipes whose fields can be set (quire.te.common.recipe): they mean what the immutable recipe of the same fields
means, at the time when they are read."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch

import quire
import quire.te as te
from quire import recipe as recipes
from quire.te.common import recipe as settable
from quire.te.common.recipe import Format, MMParams, QParams
from steps import same

KINDS = {name: getattr(settable, name) for name in settable.__all__ if hasattr(getattr(settable, name), "kind")}
CLASSES = {name: kind for name, kind in KINDS.items() if name not in ("Recipe", "CustomRecipe")}

PREDICATES = (
    "delayed",
    "float8_current_scaling",
    "float8_per_tensor_scaling",
    "float8_block_scaling",
    "mxfp8",
    "nvfp4",
)

# One field of each class, the value that it is set to, and the recipe that has it from the start.
SET = [
    ("DelayedScaling", "fp8_format", Format.E4M3),
    ("DelayedScaling", "amax_compute_algo", "most_recent"),
    ("DelayedScaling", "reduce_amax", False),
    ("Float8CurrentScaling", "use_power_2_scales", True),
    ("Float8CurrentScaling", "fp8_gemm_fprop", MMParams(use_split_accumulator=True)),
    ("Float8BlockScaling", "use_f32_scales", True),
    ("MXFP8BlockScaling", "backward_override", "dequantized"),
    ("MXFP8BlockScaling", "enable_2d_quantization", True),
    ("NVFP4BlockScaling", "disable_stochastic_rounding", True),
]


def result(recipe, layer, x, function=None):
    """y, dx and dw."""
    layer.zero_grad()
    layer.sr_state[1] = 0
    x = x.detach().requires_grad_()
    with te.autocast(recipe=recipe):
        y = (function or layer)(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad, layer.weight.grad


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = quire.Linear(64, 32)
    layer.weight.data *= 2.0 ** torch.arange(-16, 16)[:, None]  # or scales of blocks would be alike
    return layer


@pytest.fixture
def x():
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CLASSES)
def test_fields_defaults_and_their_order_are_those_of_the_immutable_recipe(name):
    made, frozen = CLASSES[name](), getattr(recipes, name)()
    assert dataclasses.asdict(made) == dataclasses.asdict(frozen)
    assert list(inspect.signature(CLASSES[name]).parameters) == [field.name for field in dataclasses.fields(frozen)]
    assert made == frozen == made.frozen() and type(made.frozen()) is type(frozen)
    assert dataclasses.replace(made) == made and repr(made) == repr(frozen)
    assert eval(repr(made), vars(settable)) == made


@pytest.mark.parametrize(("name", "field", "value"), SET)
def test_a_field_that_is_set_between_steps_is_in_force_in_the_next(name, field, value, layer, x):
    recipe, expected = CLASSES[name](), getattr(recipes, name)(**{field: value})
    result(recipe, layer, x)
    setattr(recipe, field, value)
    assert recipe == expected and recipe.frozen() == expected and recipe != CLASSES[name]()
    with te.autocast(recipe=recipe):
        assert quire.active_recipe() == expected
    if not recipe.delayed():  # whose scales the first step has changed
        assert same(result(recipe, layer, x), result(expected, layer, x))
        unchanged = same(result(recipe, layer, x), result(CLASSES[name](), layer, x))
        assert bool(unchanged) == (field == "fp8_gemm_fprop")  # which changes no results (MMParams)


def test_a_longer_history_and_a_margin_of_delayed_scaling_are_in_force_in_the_next_step(x):
    def train(recipe, change):
        torch.manual_seed(0)
        layer, found = quire.Linear(64, 32), []
        for step in range(6):
            if step == 3:
                recipe = change(recipe)
            found += result(recipe, layer, x * 2.0**-step)
        return found, quire.delayed_state(layer)["delayed"]["amax_history_fwd"]

    def set_fields(recipe):
        recipe.amax_history_len, recipe.margin = 5, 2
        return recipe

    found, history = train(te.recipe.DelayedScaling(amax_history_len=2), set_fields)
    expected, wanted = train(
        recipes.DelayedScaling(amax_history_len=2), lambda _: recipes.DelayedScaling(amax_history_len=5, margin=2)
    )
    unchanged, _ = train(recipes.DelayedScaling(amax_history_len=2), lambda recipe: recipe)
    assert same(found, expected) and not same(found, unchanged) and torch.equal(history, wanted)


@pytest.mark.parametrize(("name", "field", "value"), [SET[0], SET[6], SET[8]])
@pytest.mark.parametrize("where", ["around", "within"])
def test_a_compiled_function_sees_a_field_that_is_set(name, field, value, where, compiler, layer, x):
    recipe = CLASSES[name]()

    def within(x):
        with te.autocast(recipe=recipe):
            return layer(x)

    def call(x):
        if where == "within":
            return compiled(x)
        with te.autocast(recipe=recipe):
            return compiled(x)

    compiled = compiler(within if where == "within" else layer)
    for _ in range(2):
        with te.autocast(recipe=getattr(recipes, name)(**{field: getattr(recipe, field)})):
            expected = copy.deepcopy(layer)(x)
        assert torch.equal(call(x), expected)
        setattr(recipe, field, value)


def test_a_recipe_is_made_within_a_compiled_function(compiler, layer, x):
    def call(x):
        with te.autocast(recipe=te.recipe.MXFP8BlockScaling(fp8_format=Format.HYBRID)):
            return layer(x)

    assert torch.equal(compiler(call)(x), result(recipes.MXFP8BlockScaling(fp8_format=Format.HYBRID), layer, x)[0])


def test_a_context_and_a_decorated_function_read_the_fields_when_they_begin(layer, x):
    recipe = te.recipe.MXFP8BlockScaling()
    context, decorated = te.autocast(recipe=recipe), te.autocast(recipe=recipe)(lambda: quire.active_recipe())
    recipe.backward_override = "dequantized"
    expected = recipes.MXFP8BlockScaling(backward_override="dequantized")
    assert decorated() == expected
    with context:
        assert quire.active_recipe() == expected
        recipe.backward_override = None
        assert quire.active_recipe() == expected  # until it ends
    with context:
        assert quire.active_recipe() == recipes.MXFP8BlockScaling()


def test_what_keeps_a_recipe_keeps_the_fields_of_that_time(layer, x):
    recipe = te.recipe.MXFP8BlockScaling()
    own = quire.Linear(64, 32, recipe=recipe)
    with te.quantized_model_init(recipe=recipe):
        recipe.enable_2d_quantization = True
        assert quire.Linear(64, 32).weight.spec_text == "mxfp8:nan"
    assert own.recipe == recipes.MXFP8BlockScaling()
    converted = quire.convert(torch.nn.Sequential(torch.nn.Linear(64, 32)), recipe, min_features=1)
    assert converted[0].recipe == recipes.MXFP8BlockScaling(enable_2d_quantization=True)


# QParams that are set, and the recipe that they mean.
PARAMS = [
    (
        settable.NVFP4BlockScaling(),
        {"fp4_quant_fwd_inp": QParams(), "fp4_quant_fwd_weight": QParams(), "fp4_quant_bwd_grad": QParams()},
        recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    ),
    (
        settable.NVFP4BlockScaling(disable_rht=True),
        {
            "fp4_quant_fwd_inp": QParams(random_hadamard_transform=True),
            "fp4_quant_bwd_grad": QParams(random_hadamard_transform=True),
        },
        recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    ),
    (
        settable.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
        {"fp4_quant_bwd_grad": QParams(stochastic_rounding=False)},
        recipes.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, disable_stochastic_rounding=True),
    ),
    (
        settable.NVFP4BlockScaling(disable_rht=True),
        {"fp4_quant_fwd_inp": QParams(fp4_2d_quantization=True)},
        "x=nvfp4:16x16:nan,w=nvfp4:16x16:nan,dy=nvfp4:sr:nan",
    ),
    (
        settable.Float8CurrentScaling(),
        dict.fromkeys(("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), QParams(power_2_scale=True)),
        recipes.Float8CurrentScaling(use_power_2_scales=True),
    ),
    (
        settable.Float8CurrentScaling(backward_override="high_precision"),
        {"fp8_quant_fwd_inp": QParams(power_2_scale=True, amax_epsilon=0.25)},
        "x=fp8_tensor:pow2:eps=0.25:nan,w=fp8_tensor:nan,dy=fp8_tensor:e5m2:nan,backward=high_precision",
    ),
    (
        settable.Float8BlockScaling(),
        {"fp8_quant_bwd_grad": QParams(amax_epsilon=0.5)},
        "x=fp8_block:pow2:nan,w=fp8_block:128x128:pow2:nan,dy=fp8_block:eps=0.5:nan",
    ),
    (
        settable.Float8BlockScaling(use_f32_scales=True),
        dict.fromkeys(("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), QParams(power_2_scale=True)),
        recipes.Float8BlockScaling(),
    ),
]


@pytest.mark.parametrize(("recipe", "params", "expected"), PARAMS)
def test_the_params_of_an_operand_can_be_set(recipe, params, expected):
    recipe, before = copy.deepcopy(recipe), copy.deepcopy(recipe)
    for name, value in params.items():
        setattr(recipe, name, value)
        assert getattr(recipe, name) == value
    found = recipe.frozen()
    if isinstance(expected, str):
        wanted = recipes.as_recipe("test", expected)
        assert {part.split(":")[0] for part in expected.split(",")[:3]} == {
            part.split(":")[0] for part in found.linear_spec().split(",")[:3]
        }
        assert found.linear_spec() == wanted.linear_spec()
    else:
        assert found == expected
    assert recipe != before and pickle.loads(pickle.dumps(recipe)) == recipe == copy.deepcopy(recipe)
    assert eval(repr(before), vars(settable)) == before


def test_params_are_read_from_the_fields_until_they_are_set():
    recipe = settable.NVFP4BlockScaling()
    assert recipe.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    recipe.disable_rht = True
    assert recipe.fp4_quant_bwd_grad == QParams(stochastic_rounding=True)
    recipe.fp4_quant_fwd_weight = QParams()
    assert recipe.frozen() == recipes.NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True)
    assert "fp4_quant_fwd_weight=QParams(" in repr(recipe)


def test_recipes_are_told_apart_and_subclasses_are_recipes(layer, x):
    for name, kind in CLASSES.items():
        made, frozen = kind(), getattr(recipes, name)()
        assert isinstance(made, settable.Recipe) and issubclass(kind, settable.Recipe)
        for predicate in PREDICATES:
            assert getattr(made, predicate)() == getattr(kind, predicate)() == getattr(frozen, predicate)()
        assert [isinstance(made, other) for other in CLASSES.values()].count(True) == 1
    assert settable.CustomRecipe.custom() and not settable.CustomRecipe.mxfp8()

    class Own(settable.MXFP8BlockScaling):
        def __init__(self, note):
            super().__init__(fp8_format=Format.HYBRID)
            self.note = note

    own = Own("mine")
    assert (
        own.mxfp8() and own.note == "mine" and copy.deepcopy(own).note == "mine" and own != settable.MXFP8BlockScaling()
    )
    with te.autocast(recipe=own):
        assert te.FP8GlobalStateManager.get_fp8_recipe() is own
    assert same(result(own, layer, x), result(recipes.MXFP8BlockScaling(fp8_format=Format.HYBRID), layer, x))


def test_a_recipe_survives_pickle_and_deepcopy_and_copies_do_not_share_fields():
    recipe = settable.DelayedScaling(margin=1)
    recipe.amax_history_len = 7
    for other in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), copy.copy(recipe)):
        assert other == recipe and type(other) is settable.DelayedScaling and other.frozen() == recipe.frozen()
        other.margin = 2
        assert other != recipe and recipe.margin == 1 and other.frozen().margin == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(recipe)


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda: settable.Recipe(), TypeError, "Recipe is abstract; construct one of its subclasses"),
        (lambda: settable.MXFP8BlockScaling(margin=1), ValueError, "MXFP8BlockScaling: margin .* got 1. Leave it 0"),
        (lambda: settable.DelayedScaling(amax_history=3), TypeError, "did you mean 'amax_history_len'"),
        (
            lambda: setattr(settable.DelayedScaling(), "amax_history", 3),
            AttributeError,
            "DelayedScaling: there is no field 'amax_history'; the fields are .*did you mean 'amax_history_len'",
        ),
        (
            lambda: setattr(settable.NVFP4BlockScaling(), "fp4_quant_fwd_inp", True),
            TypeError,
            "NVFP4BlockScaling: fp4_quant_fwd_inp must be a QParams, got True",
        ),
        (lambda: te.autocast(recipe=settable.MXFP8BlockScaling), TypeError, "autocast: recipe must be a recipe"),
    ],
)
def test_what_a_recipe_does_not_take_is_refused_in_words(act, error, words):
    with pytest.raises(error, match=words):
        act()


def test_fields_that_depend_on_each_other_are_checked_when_they_are_read(layer, x):
    recipe = settable.NVFP4BlockScaling()
    recipe.row_scaled_activation = True
    with (
        pytest.raises(ValueError, match="row_scaled_activation=True needs disable_rht=True"),
        te.autocast(recipe=recipe),
    ):
        pass
    assert quire.active_recipe() is None
    recipe.disable_rht = True
    assert recipe.frozen() == recipes.NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True)
    recipe = settable.MXFP8BlockScaling()
    recipe.fp8_format = Format.E5M2
    with pytest.raises(ValueError, match="MXFP8BlockScaling: fp8_format must be one of"), te.autocast(recipe=recipe):
        pass


def test_the_global_state_has_the_object_that_autocast_was_given():
    recipe, manager = te.recipe.DelayedScaling(), te.FP8GlobalStateManager
    with te.fp8_autocast(fp8_recipe=recipe):
        assert manager.get_fp8_recipe() is recipe
        with te.autocast(recipe="nvfp4"):
            assert manager.get_fp8_recipe() == recipes.NVFP4BlockScaling()
    default = te.get_default_recipe()
    assert manager.get_fp8_recipe() == default == recipes.default()
    default.backward_override = "dequantized"
    assert te.get_default_recipe().backward_override is None
