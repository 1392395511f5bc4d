"""quire.convert(for_inference=True): weights that are stored quantized give the bits of weights that are quantized in
every call, in each way to run a model for inference."""

import copy
import gc
import io
import pickle
import re
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import pytorch
import quire
from every_recipe import DEFAULTS, WEIGHT_ONLY, each
from quire.conversion import recommend, timing
from quire.conversion.inference import inference_recipe
from quire.nn import product
from quire.tensor import operators
from steps import assert_rounded, blocks

pytestmark = pytest.mark.any_device

every_recipe = each(DEFAULTS)


@pytest.fixture(autouse=True)
def grad_mode():
    with torch.no_grad():
        yield


def converted(model, recipe, **options):
    return quire.convert(model, recipe, for_inference=True, tokens=None, **options)


def same_in_every_call(model, recipe, x):
    """What the model gives where layers of quire quantize plain weights in every call."""
    twin = quire.convert(copy.deepcopy(model), inference_recipe(recipe))
    return twin(x)


def exported(model, x):
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)), file)
    file.seek(0)
    return torch.export.load(file).module()


def loaded(model, recipe):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        other = converted(blocks(), recipe)
    other.load_state_dict(torch.load(file), assign=True)
    return other


WAYS = {
    "eager": lambda model, x, recipe, compiler: model(x),
    "fullgraph": lambda model, x, recipe, compiler: compiler(model)(x),
    "export": lambda model, x, recipe, compiler: exported(model, x)(x),
    "deepcopy": lambda model, x, recipe, compiler: copy.deepcopy(model)(x),
    "pickle": lambda model, x, recipe, compiler: pickle.loads(pickle.dumps(model))(x),
    "state_dict into meta": lambda model, x, recipe, compiler: loaded(model, recipe)(x),
    ".to": lambda model, x, recipe, compiler: model.to("cpu").eval()(x),
    "inference_mode": lambda model, x, recipe, compiler: torch.inference_mode()(model)(x),
}


@pytest.mark.parametrize("way", WAYS)
@every_recipe
def test_the_bits_are_those_of_weights_quantized_in_every_call(recipe, way, compiler, equal_bits):
    model, x = blocks(), torch.randn(5, 256)
    expected = same_in_every_call(model, recipe, x)
    assert equal_bits(WAYS[way](converted(model, recipe), x, recipe, compiler).clone(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_recipe
def test_the_dtype_of_a_model_stays(recipe, dtype, equal_bits):
    model, x = blocks(dtype=dtype), torch.randn(5, 256).to(dtype)
    expected = same_in_every_call(model, recipe, x)
    y = converted(model, recipe)(x)
    assert y.dtype == dtype and equal_bits(y, expected)


@pytest.mark.cpu_only
def test_torch_autocast_says_the_dtype_of_results(equal_bits):
    model, x = blocks(), torch.randn(5, 256)
    with torch.autocast("cpu", torch.bfloat16):
        expected = same_in_every_call(model, DEFAULTS["mxfp8"], x)
        y = converted(model, "mxfp8")(x)
    assert equal_bits(y, expected) and not equal_bits(y, model(x))


QUIRES = {
    "Linear": lambda: quire.Linear(64, 64),
    "LayerNormLinear": lambda: quire.LayerNormLinear(64, 64),
    "LayerNormMLP": lambda: quire.LayerNormMLP(64, 96, activation="swiglu"),
    "MoE": lambda: quire.MoE(64, 96, 4, 2, shared_ffn_hidden_size=64),
    "MoE, one weight": lambda: quire.MoE(64, 96, 4, 2, single_grouped_weight=True),
}


@pytest.mark.parametrize("kind", QUIRES)
@every_recipe
def test_layers_of_quire_in_the_model_are_converted_too(recipe, kind, equal_bits):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(QUIRES[kind]()), torch.randn(7, 64)
    with quire.autocast(recipe=inference_recipe(recipe)):
        expected = model(x)
    assert equal_bits(converted(model, recipe)(x), expected)
    layers = [layer for layer in model.modules() if isinstance(layer, quire.nn.product_module.ProductModule)]
    weights = [getattr(layer, name) for layer in layers for name in layer.weight_names]
    assert weights and all(isinstance(weight, quire.QuantizedTensor) for weight in weights)
    assert len(quire.conversion_report(model).converted) == len(layers)


@pytest.mark.cpu_only
@pytorch.aotinductor
def test_aotinductor_compiles_a_converted_model(tmp_path, equal_bits):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), quire.LayerNormMLP(256, 64), quire.MoE(256, 64, 3))
    others = [converted(torch.nn.Linear(256, 256), recipe) for recipe in (DEFAULTS | WEIGHT_ONLY).values()]
    x, model = torch.randn(5, 256), torch.nn.Sequential(converted(model, "nvfp4"), *others)
    expected = model(x)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    run = torch._inductor.aoti_load_package(path)
    assert equal_bits(run(x), expected) and run(x[:2]).shape == (2, 256)


@pytest.mark.interleaved
def test_values_in_high_precision_are_freed_and_nothing_requires_a_gradient():
    model = blocks(1)
    before = weakref.ref(model[0].up.weight)
    converted(model, "nvfp4")
    gc.collect()
    assert before() is None
    assert not any(parameter.requires_grad for parameter in model.parameters())
    weight = model[0].up.weight
    assert weight.spec_text == "nvfp4:nan:interleaved"  # a scale for each 1 x 16, in the order of prepack_weights
    assert weight.buffer_list()[3] is None  # no columnwise codes


def test_layers_that_shared_a_weight_still_do():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    model[1].weight = model[0].weight
    converted(model, "mxfp8")
    assert model[0].weight is model[1].weight


def test_an_embedding_keeps_the_values_that_a_layer_shared():
    embedding, head = torch.nn.Embedding(320, 256), torch.nn.Linear(256, 320, bias=False)
    head.weight = embedding.weight
    model = converted(torch.nn.Sequential(embedding, head), "mxfp8")
    assert type(embedding.weight) is torch.nn.Parameter and isinstance(head.weight, quire.QuantizedTensor)
    assert model(torch.arange(3)).shape == (3, 320)


def test_the_report_says_what_weights_take():
    report = quire.conversion_report(converted(torch.nn.Sequential(blocks(3), torch.nn.Linear(256, 2)), "mxfp8"))
    before, now = 256 * 512 * 4, 256 * 512 + 256 * 512 // 32
    assert [layer.weight_bytes for layer in report.converted] == [(before, now)] * 6
    assert report.left[0].weight_bytes is None
    assert str(report).splitlines()[2:5] == [
        "memory: 3.15 MB before, 0.82 MB now, of all that the model holds",
        "  *.*.up    256 -> 512 x 3  0.524 MB -> 0.135 MB each",
        "  *.*.down  512 -> 256 x 3  0.524 MB -> 0.135 MB each",
    ]


@pytest.mark.interleaved
def test_a_model_is_converted_again_for_inference_after_training():
    model, x = quire.convert(blocks(), "nvfp4"), torch.randn(3, 256)
    converted(model, "nvfp4")
    again = model(x)
    converted(model, "nvfp4")
    assert torch.equal(model(x), again)
    with pytest.raises(ValueError, match="its weight is quantized already, as nvfp4:nan:interleaved, not as mxfp8:nan"):
        converted(model, "mxfp8")


def test_a_report_of_two_conversions_says_which_layers_are_for_inference():
    model = blocks(2)
    quire.convert(model, "mxfp8", lambda module, name: "up" in name, for_inference=True, tokens=None)
    assert "for inference" not in str(quire.conversion_report(model))  # all of quire's layers are
    quire.convert(model, "mxfp8", lambda module, name: "down" in name)
    report = quire.conversion_report(model)
    assert {name: layer.for_inference for layer in report.layers for name in layer.names} == {
        "0.up": True,
        "0.down": False,
        "1.up": True,
        "1.down": False,
    }
    head, _, *lines = str(report).splitlines()
    assert head.endswith(" are quire's, 2 for inference and 2 for training")
    assert any(line.startswith("  *.up ") and "  for inference" in line for line in lines)
    assert any(line.startswith("  *.down ") and line.endswith("  for training") for line in lines)


def test_explain_runs_the_forward_pass_of_a_converted_model():
    model = converted(blocks(1), "nvfp4")
    with torch.enable_grad():
        explained = quire.explain(model, torch.randn(3, 256))
    assert [step.name for step in explained.products] == ["fprop"] * 2


def test_no_recipe_is_an_error_that_says_how_to_choose():
    with pytest.raises(ValueError, match="one of nvfp4, mxfp4, mxfp8, fp8_current, fp8_block; quire.recommend"):
        quire.convert(blocks(), for_inference=True)
    with pytest.raises(ValueError, match="convert: tokens must be at least 1, got 0"):
        quire.convert(blocks(), "mxfp8", for_inference=True, tokens=0)
    with pytest.raises(ValueError, match="convert: tokens=512 is .* with for_inference=True, .* or leave tokens out"):
        quire.convert(blocks(), "mxfp8", tokens=512)


# ---------------------------------------------------------------- time


@pytest.fixture
def clock(monkeypatch):
    """Says what each kind of layer takes: (in_features, recipe's name or None) -> seconds."""
    took = {}

    def best_of(calls, others, seconds):
        return [took.pop(0) for _ in calls]

    def set_times(*times):
        nonlocal took
        took = list(times)

    monkeypatch.setattr(timing, "best_of", best_of)
    return set_times


def test_layers_that_would_be_slower_are_left(clock):
    model = blocks(2)
    clock(1.0, 0.5, 1.0, 2.0)  # up is twice as fast, down half as fast
    quire.convert(model, "mxfp8", for_inference=True, tokens=7)
    assert [type(layer) for layer in model[1].children()] == [quire.Linear, torch.nn.Linear]
    report = quire.conversion_report(model)
    assert {layer.why_not for layer in report.left} == {"slower on this machine, 2000 ms with 7 rows, 1000 ms as it is"}
    assert report.tokens == 7 and {layer.seconds for layer in report.converted} == {(1.0, 0.5)}
    assert "1000 ms -> 500 ms" in str(report)


def test_a_model_that_would_be_slower_is_refused_and_stays_as_it_is(clock):
    model = blocks(2)
    clock(1.0, 1.5, 1.0, 2.0)
    with pytest.raises(ValueError, match="(?s)tokens=None to convert what is slower.*slower on this machine, 1500 ms"):
        quire.convert(model, "mxfp8", for_inference=True)
    assert type(model[0].up) is torch.nn.Linear and type(model[0].up.weight) is torch.nn.Parameter


def test_a_real_measurement_gives_times(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "_SLOWER", float("inf"))
    report = quire.conversion_report(quire.convert(blocks(1), "mxfp8", for_inference=True))
    assert all(0 < seconds < 60 for layer in report.layers for seconds in layer.seconds)


def names_of(recommendation):
    return [estimate.name for estimate in recommendation.estimates]


@pytest.mark.parametrize("goal", ["inference", "training"])
def test_the_quickest_recipe_is_recommended(goal, clock):
    layer = torch.nn.Linear(256, 256)
    clock(1.0, 0.9, 0.8, 0.7, 0.3, 2.0)  # high precision, nvfp4, mxfp4, mxfp8, fp8_current, fp8_block
    found = quire.recommend(torch.nn.Sequential(layer), 8, goal)
    assert found.recipe == "fp8_current" and names_of(found)[:2] == ["high precision", "fp8_current"]
    # fp8_block would be slower, so that its layers are left as they are.
    block = found.estimates[-1]
    assert (block.name, block.seconds, block.converted, block.seconds_of_all) == ("fp8_block", 1.0, 0, 2.0)
    assert "3.33 times as fast" in str(found) and str(found).endswith(f"for {goal}: fp8_current")
    why = "each would be more than 5 % slower on this machine"
    assert block.why_not == why and [it.why_not for it in found.estimates[:-1]] == [""] * 5
    assert f"fp8_block       converts no layer: {why}; with all converted, 0.50 times the speed\n" in str(found)


def test_conversion_and_recommendation_agree_on_what_is_slower(clock):
    times = (1.0, 1.04, 1.06, 0.5, 0.9, 2.0)
    clock(*times)
    found = quire.recommend(torch.nn.Sequential(torch.nn.Linear(256, 256)))
    assert sorted(estimate.seconds_of_all for estimate in found.estimates[1:]) == sorted(times[1:])
    for estimate in found.estimates[1:]:
        clock(1.0, estimate.seconds_of_all)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256))
        if estimate.converted:
            quire.convert(model, estimate.name, for_inference=True)
        else:
            with pytest.raises(ValueError, match="slower on this machine"):
                quire.convert(model, estimate.name, for_inference=True)


def test_a_large_model_is_timed_with_weights_that_no_cache_holds(monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "best_of", lambda calls_, others, seconds: calls.append(others) or [1.0] * len(others))
    layers = [torch.nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(3)]
    timing.measure(layers, [DEFAULTS["mxfp8"]], 1)
    assert calls == [
        [2 * 256 * 256 * 2, 2 * 256 * (256 + 8)]
    ]  # what the two other layers have, as they are and converted
    runs = [0, 0]

    def run(i):
        runs[i] += 1

    monkeypatch.undo()
    monkeypatch.setattr(timing, "_CACHES", 1 << 10)
    timing.best_of([lambda: run(0), lambda: run(1)], [0, 1 << 30], 0.0)
    assert runs == [6, 3]  # a call that finds its weights in a cache is made once more before it is timed


def test_the_more_accurate_of_equal_recipes_is_recommended(clock):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    clock(1.0, 0.521, 0.520, 0.8, 0.9, 2.0)  # nvfp4, mxfp4, mxfp8, fp8_current, fp8_block
    found = quire.recommend(model)
    assert found.recipe == "nvfp4" and found.equal == ("mxfp4", "nvfp4")
    assert names_of(found)[1:3] == ["mxfp4", "nvfp4"]
    assert "less than 5 % apart, which is noise: mxfp4, nvfp4; nvfp4 is taken for its format" in str(found)
    assert "whose weights are in float32, with 1 row" in str(found)
    clock(1.0, 0.52, 0.6, 0.54, 0.53, 2.0)
    found = quire.recommend(model)
    assert found.recipe == "fp8_current" and found.equal == ("nvfp4", "fp8_current", "mxfp8")
    clock(1.0, 0.5, 0.6, 0.54, 0.53, 2.0)
    found = quire.recommend(model)
    assert found.recipe == "nvfp4" and found.equal == ("nvfp4",) and "noise" not in str(found)


def test_a_recipe_of_4_bits_is_recommended_with_a_caution(clock):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512))
    clock(1.0, 0.7, 0.25, 0.5, 0.8, 2.0)  # nvfp4, mxfp4, mxfp8, fp8_current, fp8_block
    found = str(quire.recommend(model))
    assert found.endswith(
        "\nfor inference: mxfp4 (by speed alone: evaluate it; with 8 bits, mxfp8 has 2.00 times the speed of high "
        "precision)"
    )
    clock(1.0, 0.7, 0.25, 2.0, 2.0, 2.0)
    assert str(quire.recommend(model)).endswith("\nfor inference: mxfp4")
    clock(1.0, 0.7, 2.0, 0.5, 0.8, 2.0)
    assert str(quire.recommend(model)).endswith("\nfor inference: mxfp8")
    clock(1.0, 0.7, 0.25, 0.5, 0.8, 2.0)
    found = str(quire.recommend(model, goal="memory"))
    assert found.endswith("\nfor memory: mxfp4 (by size alone: evaluate it; with 8 bits, fp8_current has 0.131 MB)")


def test_remedies_of_an_error_are_sentences(clock):
    clock(1.0, 2.0)
    with pytest.raises(ValueError, match=r"recommend\(model, tokens\)\. Pass a smaller min_features\n"):
        quire.convert(
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(8, 8)), "mxfp8", for_inference=True
        )


@pytest.mark.cpu_only
def test_a_recommendation_says_within_which_autocast_it_was_measured(clock):
    clock(*[1.0] * 6)
    with torch.autocast("cpu", torch.bfloat16):
        found = quire.recommend(torch.nn.Sequential(torch.nn.Linear(256, 256)))
    assert found.autocast == torch.bfloat16
    assert "whose weights are in float32, within torch.autocast (bfloat16), with 1 row on" in str(found)


def test_recipes_of_ones_own_are_timed_beside_the_others(clock):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    own = ["x=mxfp8,w=nvfp4,dy=mxfp8", "x=none,w=nvfp4"]
    clock(1.0, 0.5, 0.9, 0.9, 0.9, 2.0, 0.49, 0.3)
    found = quire.recommend(model, recipes=own)
    assert found.recipe == "x=none,w=nvfp4" and len(found.estimates) == 8
    assert "no figure for x=mxfp8,w=nvfp4,dy=mxfp8\n" in str(found)
    assert "SmolLM2-135M: x=none,w=nvfp4 +24.4 %, " in str(found)
    columns = {line.index(" times as fast") for line in str(found).splitlines() if " times as fast" in line}
    assert len(columns) == 1  # whatever the length of a name
    clock(1.0, 0.5, 0.9, 0.9, 0.9, 2.0, 0.49)
    assert quire.recommend(model, recipes=own[:1]).recipe == own[0]  # as quick as nvfp4, with better inputs
    recipe = quire.recipe.NVFP4BlockScaling(disable_2d_quantization=True)
    clock(1.0, 0.5, 0.9, 0.9, 0.9, 2.0, 0.4)
    advice = quire.recommend(model, recipes=[recipe])
    assert advice.recipe == recipe.linear_spec()
    clock(1.0, 0.4)
    quire.convert(model, advice.recipe, for_inference=True)
    for wrong, error in (
        ("mxfp8", TypeError),
        (["mxfp9"], ValueError),
        (["fp8_delayed"], ValueError),
        ([None], ValueError),
        (["x=fp8_tensor:given,w=fp8_tensor,dy=none"], ValueError),
    ):
        with pytest.raises(error, match="recommend: "):
            quire.recommend(model, recipes=wrong)
    clock(1.0, 0.5, 0.9, 0.9, 0.9, 2.0)  # one for each name
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    assert len(quire.recommend(model, recipes=["mxfp8", quire.recipe.NVFP4BlockScaling()]).estimates) == 6


def test_what_a_recommendation_says_of_accuracy_is_what_was_measured(clock):
    table = (Path(__file__).parents[3] / "docs/language-model.md").read_text().split("| recipe of the layers |", 1)[1]
    row = r"^\| (?:only \w+: )?`([^`]+)` \| [\d.]+ \| ([\d.]+) ±"
    measured = dict(re.findall(row, table, re.MULTILINE))
    assert {name: f"{value:g}" for name, value in recommend.PERPLEXITY.items()} == measured
    clock(*[1.0] * 9)
    own = [name for name in measured if "=" in name]
    found = str(quire.recommend(torch.nn.Sequential(torch.nn.Linear(256, 256)), recipes=own))
    assert all(f"{name} +{value} %" in found for name, value in measured.items()) and "no figure for" not in found


def test_recipes_that_convert_nothing_stand_last_in_the_order_of_their_speed(clock):
    clock(1.0, 1.6, 0.5, 1.2, 1.4, 2.0)
    found = quire.recommend(torch.nn.Sequential(torch.nn.Linear(256, 256)))
    seconds = [it.seconds_of_all for it in found.estimates if it.why_not]
    assert len(seconds) == 4 and [round(each / seconds[0], 3) for each in seconds] == [1.0, 1.167, 1.333, 1.667]
    assert not any(it.why_not for it in found.estimates[:2])
    speeds = re.findall(r"with all converted, ([\d.]+) times", str(found))
    assert speeds == ["0.83", "0.71", "0.62", "0.50"]


def test_no_recipe_is_recommended_where_none_pays(clock):
    clock(1.0, 1.1, 1.1, 1.1, 0.99, 2.0)
    found = quire.recommend(torch.nn.Sequential(torch.nn.Linear(256, 256)))
    assert found.recipe is None
    assert str(found).endswith("for inference: high precision, since no recipe is more than 5 % faster")


def test_the_smallest_weights_are_recommended_for_memory(clock):
    clock(1.0, 5.0, 5.0, 0.1, 0.1, 0.1)
    found = quire.recommend(torch.nn.Sequential(torch.nn.Linear(256, 512)), goal="memory")
    assert found.recipe == "mxfp4"  # a byte of scale for 32 values, where nvfp4 has one for 16
    assert found.estimates[1].weight_bytes == 256 * 512 // 2 + 256 * 512 // 32


def test_a_recipe_that_converts_no_layer_is_not_ranked(clock):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    clock(1.0, 1.2, 0.98, 2.0, 1.04, 3.0)  # nvfp4, mxfp4, mxfp8, fp8_current, fp8_block
    found = quire.recommend(model)
    assert names_of(found) == ["high precision", "mxfp4", "fp8_current", "nvfp4", "mxfp8", "fp8_block"]
    assert found.recipe is None and found.equal == ("mxfp4",)
    clock(1.0, *[2.0] * 5)
    found = quire.recommend(model)
    assert found.recipe is None and found.equal == () and str(found).count("converts no layer") == 5
    assert str(found).count("times as fast") == 1 and str(found).endswith("no recipe is more than 5 % faster")
    clock(1.0, *[2.0] * 5)
    found = quire.recommend(model, goal="memory")  # speed does not matter there
    assert found.recipe == "mxfp4" and "converts no layer" not in str(found)


@pytest.mark.parametrize("goal", ["inference", "training", "memory"])
def test_a_recommendation_is_measured_and_changes_nothing(goal, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    model = blocks(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = quire.recommend(model, 4, goal)
    assert names_of(found)[0] == "high precision" and len(names_of(found)) == 6 and found.layers == 2
    assert all(0 < estimate.seconds < 60 for estimate in found.estimates)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(layer) is torch.nn.Linear and layer.weight.grad is None for layer in model[0].children())


def test_wrong_arguments_of_a_recommendation_are_refused():
    with pytest.raises(
        ValueError, match="recommend: goal must be one of 'inference', 'training', 'memory', got 'speed'"
    ):
        quire.recommend(blocks(), goal="speed")
    with pytest.raises(
        ValueError, match="recommend: Sequential has no torch.nn.Linear with at least 256 inputs.*another min_f"
    ):
        quire.recommend(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"its weights are quantized; .*quire\.dequantize_weights\(model\) first"):
        quire.recommend(converted(blocks(), "mxfp8"))
    with pytest.raises(ValueError, match="recommend: tokens must be at least 1"):
        quire.recommend(blocks(), 0)
    with pytest.raises(
        TypeError, match="tokens must be an int, .*got 'train'; the goal is passed as goal=.*'training'?"
    ):
        quire.recommend(blocks(), "train")
    for options, error, text in (
        ({"tokens": True}, TypeError, "tokens must be an int, .*got True"),
        ({"min_features": None}, TypeError, "min_features must be an int, got None"),
        ({"min_features": -1}, ValueError, "min_features must be at least 0, got -1"),
    ):
        with pytest.raises(error, match=f"^recommend: {text}"):
            quire.recommend(blocks(), **options)
    with pytest.raises(ValueError, match="weights are on the meta device, where no time can be measured; load them"):
        quire.recommend(blocks().to("meta"))


# ---------------------------------------------------------------- without a recipe


def test_weights_that_are_decoded_in_every_call_are_told_once():
    with quire.quantized_model_init(recipe="mxfp8"):
        layers = [quire.Linear(64, 64) for _ in range(2)]
    product.tell_decoding.cache_clear()
    with pytest.warns(UserWarning, match="Linear: .* decoded in every call.* quire.autocast.* quire.convert"):
        layers[0](torch.randn(2, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers[0](torch.randn(2, 64))
        layers[1](torch.randn(2, 64))


@pytest.mark.parametrize("kind", ["training", "inference"])
def test_a_baseline_in_high_precision_warns_of_nothing(kind):
    if kind == "inference":
        model = converted(blocks(), "mxfp8", gradients="input")
    else:
        with quire.quantized_model_init(recipe="mxfp8"):
            model = torch.nn.Sequential(quire.Linear(256, 256), quire.GroupedLinear(1, 256, 256))
    product.tell_decoding.cache_clear()
    operators._tell_decoding.cache_clear()
    x = torch.randn(2, 256, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.enable_grad():
            with quire.autocast(enabled=False):
                y = model(x) if kind == "inference" else model[1](model[0](x), [2])
            y.sum().backward()
    assert bool(x.grad.isfinite().all())


# ---------------------------------------------------------------- state dicts of other models


def on_meta(recipe="mxfp8", **options):
    with torch.device("meta"):
        return converted(blocks(), recipe, **options)


def test_values_in_high_precision_do_not_replace_codes_without_a_word():
    saved = blocks()
    converted(saved, "mxfp8", filter=lambda module, name: name.endswith("up")).state_dict()
    with pytest.raises(RuntimeError, match=r"0\.down\.weight: the layer was converted for inference.*filter=lambda"):
        on_meta().load_state_dict(saved.state_dict(), assign=True)


def test_the_remedy_converts_the_layers_that_the_saved_model_converted(equal_bits):
    saved, x = blocks(), torch.randn(3, 256)
    converted(saved, "mxfp8", filter=lambda module, name: name.endswith("up"))
    state_dict = saved.state_dict()
    other = on_meta(filter=lambda module, name: isinstance(state_dict[f"{name}.weight"], quire.QuantizedTensor))
    other.load_state_dict(state_dict, assign=True)
    assert equal_bits(other(x), saved(x))


@pytest.mark.cpu_only
def test_time_is_not_measured_on_meta():
    with torch.device("meta"), pytest.raises(ValueError, match=r"0\.up is on the meta device.* Pass tokens=None"):
        quire.convert(blocks(), "mxfp8", for_inference=True)


def test_values_in_high_precision_are_quantized_where_they_are_copied(equal_bits):
    source, x = blocks(), torch.randn(3, 256)
    model = converted(blocks(), "mxfp8")
    model.load_state_dict(source.state_dict())
    assert equal_bits(model(x), converted(source, "mxfp8")(x))


@pytest.mark.interleaved
def test_codes_of_another_recipe_are_refused_or_told():
    model = converted(blocks(), "mxfp8")
    with pytest.raises(RuntimeError, match=r"quantized as mxfp8:nan:interleaved.*recipe quantizes weights as nvfp4:na"):
        on_meta("nvfp4").load_state_dict(model.state_dict(), assign=True)
    with pytest.warns(UserWarning, match="mxfp8:nan:interleaved are decoded and quantized again as nvfp4:nan"):
        converted(blocks(), "nvfp4").load_state_dict(model.state_dict())


def test_a_model_for_inference_is_not_converted_for_training():
    model = converted(blocks(1), "mxfp8")
    with pytest.raises(ValueError, match="(?s)nothing to convert.*quantized for inference, without the codes that ba"):
        quire.convert(model, "mxfp8")
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"run the model under torch\.no_grad\(\)") as caught:
        model(torch.randn(3, 256, requires_grad=True)).sum().backward()
    # What the error names gives x a gradient: that of the decoded weight.
    assert all(part in str(caught.value) for part in ('gradients="input"', "x=none", "backward=dequantized"))
    for recipe, more in [
        ("mxfp8", {"gradients": "input"}),
        ("x=none,w=nvfp4,dy=none", {}),
        ("x=mxfp8,w=mxfp8,dy=mxfp8,backward=dequantized", {}),
    ]:
        model = torch.nn.Sequential(torch.nn.Linear(256, 256))
        layer = quire.convert(model, recipe, for_inference=True, tokens=None, **more)[0]
        x, dy = torch.randn(3, 256, requires_grad=True), torch.randn(3, 256)
        with torch.enable_grad():
            (dx,) = torch.autograd.grad(layer(x), x, dy)
        weight = layer.weight.detach().dequantize().double()
        assert_rounded(dx, dy.double() @ weight, dy.double().abs() @ weight.abs(), len(weight))
