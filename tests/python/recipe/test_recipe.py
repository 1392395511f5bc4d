"""Recipes: fields and defaults, the text that layers use, and what is refused in words."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch

import quire
from quire import recipe as recipes
from quire.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

FAST, SPLIT = MMParams(False), MMParams(True)
ATTENTION = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}

# docs/numerics.md 6.4, with every environment variable unset.
FIELDS = {
    DelayedScaling: {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        **ATTENTION,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False,
        "fp8_format": Format.HYBRID,
        "fp8_gemm_fprop": FAST,
        "fp8_gemm_dgrad": SPLIT,
        "fp8_gemm_wgrad": SPLIT,
        **ATTENTION,
    },
    MXFP4BlockScaling: {"activation_format": Format.E2M1, "fp8_format": Format.E4M3, **ATTENTION},
    MXFP8BlockScaling: {"margin": 0, "fp8_format": Format.E4M3, **ATTENTION, "enable_2d_quantization": False},
    Float8BlockScaling: {
        "use_f32_scales": False,
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": SPLIT,
        "fp8_gemm_dgrad": SPLIT,
        "fp8_gemm_wgrad": SPLIT,
        **ATTENTION,
    },
    NVFP4BlockScaling: {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": Format.E2M1,
        "fp8_format": Format.E4M3,
        **ATTENTION,
    },
}

TEXTS = [
    (DelayedScaling(), "x=fp8_tensor:nan,w=fp8_tensor:nan,dy=fp8_tensor:e5m2:nan"),
    (DelayedScaling(margin=1, fp8_format=Format.E4M3), "x=fp8_tensor:nan,w=fp8_tensor:nan,dy=fp8_tensor:nan"),
    (Float8CurrentScaling(), "x=fp8_tensor:nan,w=fp8_tensor:nan,dy=fp8_tensor:e5m2:nan"),
    (Float8CurrentScaling(fp8_format=Format.E4M3), "x=fp8_tensor:nan,w=fp8_tensor:nan,dy=fp8_tensor:nan"),
    (Float8CurrentScaling(True), "x=fp8_tensor:pow2:nan,w=fp8_tensor:pow2:nan,dy=fp8_tensor:e5m2:pow2:nan"),
    (Float8BlockScaling(), "x=fp8_block:pow2:nan,w=fp8_block:128x128:pow2:nan,dy=fp8_block:pow2:nan"),
    (Float8BlockScaling(use_f32_scales=True), "x=fp8_block:nan,w=fp8_block:128x128:nan,dy=fp8_block:nan"),
    (
        Float8BlockScaling(fp8_format=Format.HYBRID, w_block_scaling_dim=1, grad_block_scaling_dim=2),
        "x=fp8_block:pow2:nan,w=fp8_block:pow2:nan,dy=fp8_block:e5m2:128x128:pow2:nan",
    ),
    (MXFP8BlockScaling(), "x=mxfp8:nan,w=mxfp8:nan,dy=mxfp8:nan"),
    (MXFP8BlockScaling(fp8_format=Format.HYBRID), "x=mxfp8:nan,w=mxfp8:nan,dy=mxfp8:e5m2:nan"),
    (MXFP8BlockScaling(enable_2d_quantization=True), "x=mxfp8:nan,w=mxfp8:32x32:nan,dy=mxfp8:nan"),
    (MXFP4BlockScaling(), "x=mxfp4:nan,w=mxfp4:nan,dy=mxfp8:nan"),
    (MXFP4BlockScaling(fp8_format=Format.HYBRID), "x=mxfp4:nan,w=mxfp4:nan,dy=mxfp8:e5m2:nan"),
    (MXFP4BlockScaling(activation_format=Format.E4M3), "x=mxfp8:nan,w=mxfp4:nan,dy=mxfp8:nan"),
    (NVFP4BlockScaling(), "x=nvfp4:rht:nan,w=nvfp4:16x16:nan,dy=nvfp4:rht:sr:nan"),
    (NVFP4BlockScaling(disable_rht=True), "x=nvfp4:nan,w=nvfp4:16x16:nan,dy=nvfp4:sr:nan"),
    (NVFP4BlockScaling(disable_stochastic_rounding=True), "x=nvfp4:rht:nan,w=nvfp4:16x16:nan,dy=nvfp4:rht:nan"),
    (NVFP4BlockScaling(disable_2d_quantization=True), "x=nvfp4:rht:nan,w=nvfp4:nan,dy=nvfp4:rht:sr:nan"),
    (
        NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
        "x=nvfp4:row_scaled:nan,w=nvfp4:16x16:nan,dy=nvfp4:sr:nan",
    ),
    (NVFP4BlockScaling(nvfp4_4over6="weights"), "x=nvfp4:rht:nan,w=nvfp4:16x16:4over6=mae:256:nan,dy=nvfp4:rht:sr:nan"),
    (
        NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, nvfp4_4over6="all"),
        "x=nvfp4:row_scaled:4over6=mae:256:nan,w=nvfp4:16x16:4over6=mae:256:nan,dy=nvfp4:sr:nan",
    ),
    (
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="activations", nvfp4_4over6_err_mode="MSE"),
        "x=nvfp4:4over6=mse:256:nan,w=nvfp4:16x16:nan,dy=nvfp4:sr:nan",
    ),
    (
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="weights"),
        "x=nvfp4:4over6=mae:nan,w=nvfp4:16x16:4over6=mae:256:nan,dy=nvfp4:sr:nan",
    ),
    (
        NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_e4m3_use_256="activations"),
        "x=nvfp4:rht:nan,w=nvfp4:16x16:4over6=mae:nan,dy=nvfp4:rht:sr:nan",
    ),
    (
        CustomRecipe({"x": "mxfp8", "w": "nvfp4:16x16", "dy": "fp8_row:e5m2"}.get),
        "x=mxfp8,w=nvfp4:16x16,dy=fp8_row:e5m2",
    ),
    (CustomRecipe(lambda role: quire.QuantSpec("mxfp4")), "x=mxfp4,w=mxfp4,dy=mxfp4"),
]

REFUSED = [
    (
        Float8CurrentScaling,
        {"fp8_format": Format.E5M2},
        ValueError,
        "fp8_format must be one of Format.E4M3, Format.H",
    ),
    (Float8CurrentScaling, {"fp8_format": "HYBRID"}, ValueError, "got 'HYBRID'"),
    (Float8CurrentScaling, {"fp8_gemm_fprop": True}, TypeError, "fp8_gemm_fprop must be an MMParams"),
    (Float8CurrentScaling, {"use_power_2_scales": "yes"}, ValueError, "use_power_2_scales must be one of False, True"),
    (Float8CurrentScaling, {"fp8_dpa": True}, NotImplementedError, "fp8_dpa=True"),
    (MXFP8BlockScaling, {"fp8_mha": True}, NotImplementedError, "Leave both False"),
    (MXFP8BlockScaling, {"backward_override": "fp32"}, ValueError, "one of None, 'high_precision', 'dequantized'"),
    (MXFP8BlockScaling, {"margin": 1}, ValueError, "margin.* got 1. Leave it 0"),
    (MXFP8BlockScaling, {"fp8_format": Format.E2M1}, ValueError, "MXFP8BlockScaling: fp8_format"),
    (MXFP4BlockScaling, {"activation_format": Format.E5M2}, ValueError, "MXFP4BlockScaling: activation_format must be"),
    (MXFP4BlockScaling, {"activation_format": "mxfp8"}, ValueError, "one of Format.E2M1, Format.E4M3; got 'mxfp8'"),
    (MXFP4BlockScaling, {"fp8_format": Format.E2M1}, ValueError, "MXFP4BlockScaling: fp8_format"),
    (Float8BlockScaling, {"x_block_scaling_dim": 3}, ValueError, "x_block_scaling_dim must be one of 1, 2; got 3"),
    (Float8BlockScaling, {"x_block_scaling_dim": 2}, ValueError, "x_block_scaling_dim=2, w_block_scaling_dim=2"),
    (Float8BlockScaling, {"grad_block_scaling_dim": 2}, ValueError, "Set all but one to 1"),
    (Float8BlockScaling, {"fp8_gemm_wgrad": MMParams(False)}, ValueError, "fp8_gemm_wgrad.*Leave it at its default"),
    (NVFP4BlockScaling, {"fp4_format": Format.E4M3}, ValueError, "fp4_format must be one of Format.E2M1"),
    (NVFP4BlockScaling, {"fp8_format": Format.HYBRID}, ValueError, "fp8_format must be one of Format.E4M3"),
    (NVFP4BlockScaling, {"row_scaled_activation": True}, ValueError, "Set disable_rht=True"),
    (NVFP4BlockScaling, {"nvfp4_4over6": "all"}, ValueError, "nvfp4_4over6='all' needs disable_rht=True"),
    (
        NVFP4BlockScaling,
        {"nvfp4_4over6": "everything"},
        ValueError,
        "'weights', 'activations', 'all'; got 'every",
    ),
    (NVFP4BlockScaling, {"nvfp4_4over6_e4m3_use_256": True}, ValueError, "nvfp4_4over6_e4m3_use_256 must be one of"),
    (NVFP4BlockScaling, {"nvfp4_4over6_err_mode": "mae"}, ValueError, "'MAE', 'MSE'; got 'mae'"),
    (CustomRecipe, {"qfactory": "mxfp8"}, TypeError, "qfactory must be callable"),
    (CustomRecipe, {"qfactory": lambda role: None}, TypeError, r"qfactory\('x'\) must return a QuantSpec or its text"),
    (
        CustomRecipe,
        {"qfactory": lambda role: "mxfp9"},
        ValueError,
        "CustomRecipe: x: spec: unknown family in '>>mxfp9<<'",
    ),
    (CustomRecipe, {"qfactory": lambda role: torch.ones(4096)}, TypeError, r"qfactory\('x'\) must .* got Tensor;"),
    (MMParams, {"use_split_accumulator": "a"}, TypeError, "MMParams: use_split_accumulator must be a bool, got 'a'"),
    (recipes.QParams, {"power_2_scale": "a"}, TypeError, "QParams: power_2_scale must be a bool, got 'a'"),
    (recipes.QParams, {"amax_epsilon": "a"}, TypeError, "QParams: amax_epsilon must be a number, got 'a'"),
    (
        CustomRecipe,
        {"qfactory": lambda role: "mxfp8", "fp8_format": Format.E4M3},
        ValueError,
        "fp8_format has no effect",
    ),
    (CustomRecipe, {"qfactory": lambda role: "mxfp8", "quantization_alignment": 32}, ValueError, "Leave it 128"),
    (CustomRecipe, {"qfactory": lambda role: "mxfp8", "fp8_dpa": True}, NotImplementedError, "CustomRecipe: fp8_dpa"),
    (recipes.Recipe, {}, TypeError, "Recipe is abstract"),
    (DelayedScaling, {"fp8_format": Format.E5M2}, ValueError, "DelayedScaling: fp8_format must be one of"),
    (DelayedScaling, {"margin": 0.5}, ValueError, "margin must be an int between -255 and 255; got 0.5"),
    (
        DelayedScaling,
        {"margin": 159},
        ValueError,
        "margin=159 makes every scale 0 .* 448 times 2.-margin is 0 in float32",
    ),
    (DelayedScaling, {"amax_history_len": 0}, ValueError, "amax_history_len must be an int between 1 and"),
    (DelayedScaling, {"amax_compute_algo": "mean"}, ValueError, "one of 'max', 'most_recent'; got 'mean'"),
    (DelayedScaling, {"scaling_factor_compute_algo": "max"}, TypeError, "None or a function .* got 'max'"),
    (DelayedScaling, {"reduce_amax": 1.5}, ValueError, "reduce_amax must be one of False, True"),
    (DelayedScaling, {"backward_override": "dequantized"}, ValueError, "backward_override must be one of None; got"),
    (DelayedScaling, {"fp8_dpa": True}, NotImplementedError, "DelayedScaling: fp8_dpa"),
]


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_a_recipe_has_the_fields_and_defaults_of_the_contract(kind):
    made = kind()
    assert {f.name: getattr(made, f.name) for f in dataclasses.fields(made)} == FIELDS[kind]
    assert [f.name for f in dataclasses.fields(made)] == list(FIELDS[kind])  # the order of positional arguments


@pytest.mark.parametrize("made, text", TEXTS, ids=[text for _, text in TEXTS])
def test_a_recipe_has_this_text(made, text):
    assert made.linear_spec() == text
    assert made.stochastic == (":sr" in text)


@pytest.mark.parametrize("made, text", TEXTS, ids=[text for _, text in TEXTS])
def test_the_operators_take_the_text_of_a_recipe_and_it_is_canonical(made, text):
    torch.ops.quire.linear(torch.randn(2, 32), torch.randn(3, 32), None, text, torch.float32)
    for part in text.split(","):
        spec = part.split("=", 1)[1]
        assert quire.QuantSpec(spec).text == spec


@pytest.mark.parametrize("kind, fields, error, words", REFUSED)
def test_a_field_that_cannot_be_honoured_is_refused_in_words(kind, fields, error, words):
    with pytest.raises(error, match=words):
        kind(**fields)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: recipes.names("a"), TypeError, "recipe.names: delayed must be a bool, got 'a'"),
        (lambda: recipes.default(None), TypeError, "recipe.default: device_type must be .* got None"),
        (lambda: recipes.default("cuda"), NotImplementedError, "recipe.default: quire has no default recipe for"),
        (
            lambda: MXFP8BlockScaling().linear_spec("a"),
            TypeError,
            "MXFP8BlockScaling.linear_spec: fp8_grad must be a b",
        ),
        (lambda: recipes.as_recipe("test", torch.ones(4096)), TypeError, "test: recipe must be .* got Tensor;"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(call, error, words):
    with pytest.raises(error, match=f"^{words}"):
        call()


def test_the_largest_margin_still_makes_scales():
    history, one = torch.zeros(1, 1), torch.ones(1)
    for margin, least in ((158, 2.0**-149), (159, 0.0)):
        _, scale = quire.debug.delayed_update(history, one, one, margin=margin)
        assert scale == least
    assert DelayedScaling(margin=158).margin == 158
    assert DelayedScaling(margin=255, scaling_factor_compute_algo=lambda *values: values[1]).margin == 255


def test_a_recipe_is_an_immutable_value():
    a, b = NVFP4BlockScaling(disable_rht=True), NVFP4BlockScaling(disable_rht=True)
    assert a == b and hash(a) == hash(b) and a != NVFP4BlockScaling()
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.disable_rht = False


@pytest.mark.parametrize("name", quire.recipe.names())
def test_no_field_of_a_recipe_can_be_written(name):
    recipe = quire.recipe.from_name(name)
    before = recipe.linear_spec()
    for field in (*[field.name for field in dataclasses.fields(recipe)], "anything"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recipe, field, None)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(recipe, field)
    assert recipe == quire.recipe.from_name(name) and recipe.linear_spec() == before


def test_a_recipe_survives_pickle_deepcopy_and_replace():
    made = NVFP4BlockScaling(disable_rht=True)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert other == made and other.linear_spec() == made.linear_spec()
    replaced = dataclasses.replace(made, disable_rht=False)
    assert replaced.linear_spec() == NVFP4BlockScaling().linear_spec()


def test_from_name_gives_the_default_recipes():
    made = {name: type(recipes.from_name(name)) for name in ("nvfp4", "mxfp8", "fp8_current", "fp8_block")}
    assert list(made.values()) == [NVFP4BlockScaling, MXFP8BlockScaling, Float8CurrentScaling, Float8BlockScaling]
    assert recipes.from_name("fp8_delayed") == DelayedScaling() and recipes.from_name("mxfp4") == MXFP4BlockScaling()


def test_from_name_lists_the_names_and_the_nearest():
    with pytest.raises(ValueError, match="the recipes are nvfp4, .*, fp8_block, fp8_delayed; did you mean 'nvfp4'?"):
        recipes.from_name("nvpf4")
    for wrong in (7, [7]):
        with pytest.raises(ValueError, match="^recipe.from_name: there is no recipe .?7"):
            recipes.from_name(wrong)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("fp8", "'fp8_current'"),
        ("int8", "'x=none,w=nvfp4'"),
        ("W4A16", "'x=none,w=nvfp4'"),
        ("best", "a spec for each"),
    ],
)
def test_names_of_other_libraries_lead_to_what_is_near(name, instead):
    with pytest.raises(ValueError, match=f"test: there is no recipe '{name}'; the recipes are .*{instead}"):
        recipes.as_recipe("test", name)


def test_the_default_recipe_is_mxfp8_on_the_cpu():
    assert recipes.default() == recipes.default("cpu") == MXFP8BlockScaling()
    with pytest.raises(NotImplementedError, match="device 'cuda'.*name a recipe"):
        recipes.default("cuda")


def test_predicates_tell_the_classes_apart():
    names = ["float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "custom", "delayed", "mxfp4"]
    made = [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]
    made += [CustomRecipe(lambda role: "mxfp8"), DelayedScaling(), MXFP4BlockScaling()]
    for i, one in enumerate(made):
        assert [getattr(one, name)() for name in names].index(True) == i
        assert sum(getattr(one, name)() for name in names) == 1
    assert [one.float8_per_tensor_scaling() for one in made] == [True, False, False, False, False, True, False]


def test_the_environment_changes_no_default():
    code = (
        "from quire import recipe as r; print(r.NVFP4BlockScaling() , r.Float8CurrentScaling(), r.Float8BlockScaling())"
    )
    variables = {
        "NVTE_NVFP4_DISABLE_RHT": "1",
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        "NVTE_BACKWARD_OVERRIDE": "dequantized",
    }
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables | path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == f"{NVFP4BlockScaling()} {Float8CurrentScaling()} {Float8BlockScaling()}"


TEXT = "x=mxfp8:nan,w=mxfp8:nan,dy=mxfp8:e5m2:nan"


def under(said, compiler, x, way):
    """y and dx of one layer, told its recipe in one of the ways."""
    torch.manual_seed(0)
    own = {"recipe": said} if way == "of the layer" else {}
    if way == "of weights":
        with quire.quantized_model_init(recipe=said):
            layer = quire.Linear(64, 32)
    else:
        layer = quire.Linear(64, 32, **own)
    if way == "of converted layers":
        layer = quire.convert(torch.nn.Sequential(layer), said, min_features=1)
    if way == "of kept weights":
        quire.quantize_weights(layer, said)

    def call(x):
        if "layer" in way:
            return layer(x)
        with quire.autocast(recipe=said):
            return layer(x)

    x = x.clone().requires_grad_()
    y = (compiler(call) if "compiled" in way else call)(x)
    y.square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize(
    "way",
    ["of autocast", "of autocast, compiled", "of the layer", "of converted layers", "of weights", "of kept weights"],
)
@pytest.mark.parametrize(
    ("said", "same"),
    [(TEXT, recipes.MXFP8BlockScaling(fp8_format=Format.HYBRID)), ("mxfp8", recipes.MXFP8BlockScaling())],
)
def test_a_name_and_a_text_mean_the_recipe_wherever_one_is_taken(said, same, way, compiler, equal_bits):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    for found, expected in zip(under(said, compiler, x, way), under(same, compiler, x, way), strict=True):
        assert equal_bits(found, expected)


def test_recipes_of_one_text_are_equal_also_after_pickling():
    for text in (TEXT, f"{TEXT},backward=dequantized"):
        made = recipes.as_recipe("test", text)
        assert (
            made == recipes.as_recipe("test", text) == pickle.loads(pickle.dumps(made)) and made.linear_spec() == text
        )


@pytest.mark.parametrize("text", ["x=mxfp8", f"{TEXT},dx=mxfp8", f"{TEXT},x=mxfp8", f"{TEXT},", f"{TEXT},backward=no"])
def test_a_text_that_is_no_recipe_is_refused_in_words(text):
    with pytest.raises(ValueError, match="^test: (a recipe text has|CustomRecipe: backward_override)"):
        recipes.as_recipe("test", text)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("x=mxfp8,w=nvfp4", "got 'x=mxfp8,w=nvfp4'. dy, the gradient of y, is missing. With the format of x"),
        ("x=mxfp8", "w and dy are missing: add w=SPEC,dy=SPEC"),
        ("w=nvfp4:16x16", "To quantize weights only, write 'x=none,w=nvfp4:16x16'"),
        (f"{TEXT},dx=mxfp8", "fp8_grad="),
        (f"{TEXT},y=mxfp8", "Leave out 'y'"),
        (f"{TEXT},x=mxfp8", "Name each once"),
    ],
)
def test_the_error_of_a_text_says_what_to_change_in_it(text, remedy):
    with pytest.raises(ValueError, match="a recipe text has") as caught:
        quire.autocast(recipe=text)
    assert remedy in str(caught.value) and ("fp8_grad" in str(caught.value)) == ("dx" in text)


@pytest.mark.parametrize(
    "roles", [{"x": "mxfp8", "w": "nvfp4"}, {"x": "fp8_tensor", "w": "mxfp8"}, {"x": "none", "w": "nvfp4"}]
)
def test_the_spec_of_dy_that_an_error_names_makes_a_recipe(roles):
    with pytest.raises(
        TypeError, match=r"qfactory\('dy'\) must return a QuantSpec or its text, got None; dy is the"
    ) as caught:
        CustomRecipe(roles.get)
    dy = str(caught.value).rpartition("dy=")[2]
    assert CustomRecipe({**roles, "dy": dy}.get).specs.dy == dy


def test_the_call_that_the_error_of_a_dict_names_makes_the_recipe():
    roles = {"x": "mxfp8", "w": "mxfp4", "dy": "mxfp8:e5m2"}
    with pytest.raises(TypeError, match="qfactory must be callable with a role") as caught:
        CustomRecipe(roles)
    call = str(caught.value).rpartition("of the dict: ")[2]
    assert eval(call).linear_spec() == "x=mxfp8,w=mxfp4,dy=mxfp8:e5m2"


def test_a_name_in_capitals_suggests_the_name():
    with pytest.raises(ValueError, match="autocast: there is no recipe 'MXFP8'.*did you mean 'mxfp8'"):
        quire.autocast(recipe="MXFP8")
