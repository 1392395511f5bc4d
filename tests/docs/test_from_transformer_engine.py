"""docs/from-transformer-engine.md: every name in it is where it says, or missing as it says."""

import inspect
import re

import pytest
import quire.te.pytorch.custom_recipes.quantizer_factories
import torch

import quire
from quire import te
from quire.te.names import ABSENT

PAGE = "docs/from-transformer-engine.md"


def names_in(text):
    return [name.split("(")[0] for name in re.findall(r"`([\w.]+(?:\(\))?)`", text)]


def places():
    """Where a name may be found."""
    with quire.quantized_model_init(preserve_high_precision_init_val=True):
        layer = te.Linear(32, 32)
    x = torch.ones(2, 32)
    layer.weight.main_grad, layer.weight.overwrite_main_grad = torch.zeros(32, 32), False
    layer.weight.grad_added_to_main_grad = False
    delayed = quire.Linear(32, 32, delay_wgrad_compute=True)
    takes = (te.Linear, te.Linear.forward, te.GroupedLinear, te.GroupedLinear.forward)
    given = [name for each in takes for name in inspect.signature(each).parameters]
    arguments = type("Arguments", (), dict.fromkeys(given))
    recipes = [quire.recipe.NVFP4BlockScaling(), quire.recipe.Float8CurrentScaling()]
    return [
        quire,
        te,
        quire.recipe,
        quire.te.quantizer_factories,
        quire.te.pytorch.quantization,
        layer,
        layer.weight,
        delayed.weight,
        arguments,
        *recipes,
        te.MXFP8Quantizer(7),
        quire.quantize(x, "mxfp8"),
    ]


def test_every_name_that_is_here_is_found(page):
    rows, where = page(PAGE).rows("What is here"), places()
    wanted = [name for row in rows for name in names_in(row[0])]
    assert len(wanted) > 60
    assert [name for name in wanted if not any(hasattr(place, name) for place in where)] == []
    for row in rows:
        for name in names_in(row[1]):
            value = quire
            for part in name.removeprefix("quire.").split("."):
                value = getattr(value, part) if part != "isinstance" else isinstance


def test_every_public_name_of_quire_that_transformer_engine_has_is_documented(page):
    own = {"active_recipe", "debug", "delayed", "dequantize", "explain", "quantize", "quantize_weights", "recipe"}
    own |= {"prepack_weights", "unpack_weights", "synchronize"}
    own |= {"calibrate", "CalibrationReport", "LayerCalibration", "quantize_model"}
    own |= {
        "QuantSpec",
        "QuantizedActivation",
        "QuantizedStack",
        "Quantizer",
        "TensorProto",
        "delayed_state",
        "set_delayed_state",
    }
    own |= {
        "amax",
        "distributed",
        "rng_state",
        "set_rng_state",
        "TrainingState",
        "convert",
        "conversion_report",
        "ConversionReport",
        "LayerReport",
        "ParameterReport",
        "moe",
        "recommend",
        "Recommendation",
        "RecipeEstimate",
    }
    own |= {"nvfp4_linear", "nvfp4_moe", "nvfp4_moe_routed", "runners", "MoE"}
    own |= {"refit", "RefitReport", "dequantize_weights"}
    own |= {"batch_invariant", "set_batch_invariant", "is_batch_invariant_enabled"}
    documented = {name for row in page(PAGE).rows("What is here") for name in names_in(row[0])}
    assert set(quire.__all__) - own - documented == set()


def test_options_that_are_not_available_raise_with_their_name(page):
    names = names_in(page(PAGE).section("Options that are not available").split("\n\n")[1])
    assert len(names) == 7
    for name in names:
        with pytest.raises(NotImplementedError, match=f"quire.Linear: {name}=2 is not available"):
            te.Linear(8, 8, **{name: 2})


def test_names_that_are_not_here_say_why_and_what_instead(page):
    documented = {}
    for names, why, instead in page(PAGE).rows("Names that are not here"):
        documented |= dict.fromkeys(names_in(names), (why, instead))
    assert documented == ABSENT
    for name, (why, instead) in ABSENT.items():
        assert not hasattr(te, name)
        with pytest.raises(AttributeError, match=re.escape(f"quire.te.{name} is not available: {why}. Use {instead}")):
            getattr(te, name)
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'something_else'"):
        getattr(quire, "something_else")  # noqa: B009


# A dotted name in "instead" is one that can be called or imported.
@pytest.mark.parametrize("instead", sorted({instead for _, instead in ABSENT.values()}))
def test_what_to_use_instead_exists(instead):
    found = re.findall(r"\b(?:quire|torch)(?:\.\w+)+", instead)
    for name in found:
        module, value = name.split(".")[0], {"quire": quire, "torch": torch}
        path = name.split(".")[1:]
        value = value[module]
        for i, part in enumerate(path):
            if not hasattr(value, part):
                __import__(".".join([module, *path[: i + 1]]))
            value = getattr(value, part)
    assert found or "ctx.save_for_backward" in instead
