"""Statements of the pages about what happens, and figures that stand in two places."""

import re
import threading
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import bars
import quire
from python.io.checkpoint_files import Files, modelopt_config, modelopt_nvfp4
from quire import io
from quire.tensor import writes

DIARY = "docs/benchmarks-diary.md"


def says(page, name: str, statement: str) -> bool:
    return statement in " ".join(page(name).text.split())


def test_states_of_a_compiled_model_have_a_prefix_and_fit_only_one(page):
    assert says(page, "docs/train-and-resume.md", "They fit only a wrapper. Loading them into `model` raises an error")
    model = quire.convert(torch.nn.Sequential(torch.nn.Linear(256, 256)), "nvfp4")
    compiled = torch.compile(model, backend="eager")
    assert {*compiled.state_dict()} == {"_orig_mod.0.weight", "_orig_mod.0.bias"}
    assert {*quire.rng_state(compiled)} == {"_orig_mod.0"}
    for load, state in (
        (torch.nn.Module.load_state_dict, compiled.state_dict()),
        (quire.set_rng_state, quire.rng_state(compiled)),
    ):
        load(compiled, state)
        with pytest.raises((RuntimeError, ValueError), match="_orig_mod|the state has not: '0'"):
            load(model, state)
        load(model, {name.removeprefix("_orig_mod."): value for name, value in state.items()})
    with quire.autocast(recipe="fp8_delayed"):
        compiled(torch.randn(4, 256))
    with pytest.raises(ValueError, match="_orig_mod.0.delayed"):
        quire.set_delayed_state(model, quire.delayed_state(compiled))
    state = quire.TrainingState(compiled, recipe="nvfp4").state_dict()
    assert {*state["model"]} == {"0.weight", "0.bias"} and {*state["rng"]} == {"0"}
    model.compile(backend="eager")
    assert {*model.state_dict()} == {"0.weight", "0.bias"}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = torch.nn.Embedding(512, 256), torch.nn.Linear(256, 256, bias=False)
        self.head = torch.nn.Linear(256, 512, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.filterwarnings("ignore")
def test_the_bytes_of_a_recommendation_are_those_of_layers_without_a_tied_embedding(page, monkeypatch):
    assert says(
        page, "docs/which-recipe.md", "An embedding that shares its weight with one of them keeps its values, which do"
    )
    monkeypatch.setattr(quire.conversion.timing, "SECONDS", 0.0)
    model = Tied()
    advice = quire.recommend(model, goal="memory")
    sizes = {estimate.name: estimate.weight_bytes for estimate in advice.estimates}
    numbers = 256 * 256 + 256 * 512
    assert sizes["high precision"] == numbers * 4 and sizes["mxfp4"] == numbers // 2 + numbers // 32
    quire.convert(model, "mxfp4", for_inference=True, tokens=None)
    before, now = quire.conversion_report(model).nbytes
    assert before == numbers * 4
    assert 0 <= now - (sizes["mxfp4"] + 256 * 512 * 4) < 1000  # beside the codes: the embedding, and states of layers


def test_the_megabytes_that_a_layer_keeps_for_backward_are_those_of_the_page(page):
    kept = {}
    for recipe in ("", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "mxfp4", "nvfp4"):
        layer = quire.Linear(1024, 1024, bias=False, params_dtype=torch.bfloat16)
        x, storages = torch.zeros(4096, 1024, dtype=torch.bfloat16, requires_grad=True), {}

        def pack(t, storages=storages):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            with quire.autocast(enabled=bool(recipe), recipe=recipe or None):
                layer(x)
        storages.pop(layer.weight.untyped_storage().data_ptr(), None)
        kept[recipe] = round(sum(storages.values()) / 1e6, 1)
    eight, four = ({kept[r] for r in recipes.split()} for recipes in ("fp8_current fp8_block mxfp8", "mxfp4 nvfp4"))
    assert kept["fp8_delayed"] in eight
    assert says(
        page,
        "docs/which-recipe.md",
        f"keeps {kept['']} MB without a recipe, {min(eight)} to {max(eight)} MB with 8-bit recipes, and {min(four)} to "
        f"{max(four)} MB with `mxfp4` and `nvfp4`",
    )


def test_the_megabytes_of_the_language_model_are_those_of_its_linear_layers(page):
    """SmolLM2-135M: 30 blocks of width 576, 3 heads of keys and values of 64, 1536 between, 49152 tokens."""
    blocks = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536)
    head = 49152 * 576
    bits = {
        "float32": (32, 32),
        "bfloat16": (16, 16),
        "fp8_current": (8, 8),
        "mxfp8": (8.25, 8.25),
        "nvfp4": (4.5, 8.25),
    }
    told = {row[0].strip("`"): int(row[1]) for row in page("docs/language-model.md").rows("A language model")}
    assert told == {name: round((blocks * one + head * other) / 8e6) for name, (one, other) in bits.items()}
    assert f"{head * 2 / 1e6:.0f} MB more, in bfloat16" in page("docs/language-model.md").text


def test_a_recipe_that_is_assigned_later_is_in_the_model_and_not_in_the_report(page):
    assert says(
        page, "docs/observing.md", "assign to a layer later is not in the report: `print(model)` shows the present"
    )
    model = quire.convert(torch.nn.Sequential(torch.nn.Linear(256, 256)), "mxfp8")
    model[0].recipe = "x=mxfp8,w=nvfp4,dy=mxfp8"
    assert "recipe=CustomRecipe('x=mxfp8,w=nvfp4,dy=mxfp8')" in str(model)
    assert "nvfp4" not in str(quire.conversion_report(model))


@pytest.mark.filterwarnings("ignore")
def test_the_shape_of_a_weight_is_in_the_row_of_the_layer_with_the_time_of_what_it_calls(page):
    assert says(page, "docs/observing.md", "Layers whose x has the same shape share one row of `quire::linear_fwd`")
    assert says(page, "docs/observing.md", 'pass `sort_by="cpu_time_total"`, which includes')
    layers, x = (quire.Linear(320, 192), quire.Linear(320, 64)), torch.randn(32, 320)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as found:
        with quire.autocast(recipe="mxfp8"):
            for layer in layers:
                layer(x).sum().backward()
    rows = found.key_averages(group_by_input_shape=True)
    (work,) = [row for row in rows if row.key == "quire::linear_fwd"]
    assert work.count == 2 and [192, 320] not in work.input_shapes
    calls = [row for row in rows if row.key == "quire::linear"]
    assert [row.input_shapes[1] for row in sorted(calls, key=lambda row: -row.input_shapes[1][0])] == [
        [192, 320],
        [64, 320],
    ]
    assert all(row.count == 1 and row.self_cpu_time_total < row.cpu_time_total for row in calls)


def test_values_of_two_dialects_differ_by_a_few_ulps(page, tmp_path):
    """Each decodes by at most three rounded operations, of which two differ, and a global scale that is a quotient: at
    most 4 ulps apart."""
    assert says(
        page,
        "docs/checkpoints.md",
        "decoded values can differ by a few ulps of float32, also after an exact conversion",
    )
    one, worst = np.float32(1), 0
    scales = [x for x in np.linspace(0.001, 0.002, 400, dtype=np.float32) if one / (one / x) == x][::10]
    for number, scale in enumerate(scales):
        tensors = modelopt_nvfp4("m.a", 32, 64, scale2=float(scale))[0] | {"m.a.input_scale": torch.tensor(0.5)}
        source = Files(tensors, modelopt_config("NVFP4")).write(tmp_path / f"a{number}")
        report = io.convert(source, tmp_path / f"b{number}", to="compressed-tensors")
        for what in io.diff(source, tmp_path / f"b{number}").different.values():
            worst = max(worst, int(re.search(r"at most (\d+) ulp", what)[1]))
        assert report.losses == ()
    assert 1 < worst <= 4


# ---------------------------------------------------------------- figures in two places


def ranges(text: str) -> list[tuple[float, float]]:
    return [(float(low), float(high or low)) for low, high in re.findall(r"(\d+\.\d+)(?: to (\d+\.\d+))? times", text)]


def covered(text: str, figures: list[float]) -> bool:
    """Whether the ranges of the text have every figure, rounded to a tenth, and none begins or ends elsewhere."""
    lows, highs = zip(*ranges(text), strict=True)
    return (round(min(lows), 1), round(max(highs), 1)) == (round(min(figures) + 1e-9, 1), round(max(figures) + 1e-9, 1))


def test_no_first_page_says_that_matmuls_run_in_a_format(root):
    """Kernels convert codes first, to bfloat16, int8 or float32: only operands have the formats."""
    first = "README.md", "docs/index.md", "docs/design.md", "docs/which-recipe.md", "pyproject.toml", "mkdocs.yml"
    texts = {name: " ".join((root / name).read_text().split()) for name in first} | {"quire": quire.__doc__}
    wrong = re.compile(
        r"(matmuls?|products?|multiplications?)[^.]{0,20} (run|computed|done|multiplied) in (FP|MXFP|NVFP)"
    )
    assert wrong.search("PyTorch layers whose matrix products run in FP8")
    assert [name for name, text in texts.items() if wrong.search(text)] == []
    assert "converted to bfloat16 before the multiplication" in texts["docs/which-recipe.md"]


def test_codes_that_a_model_without_them_loads_are_decoded_with_a_warning(page, monkeypatch):
    said = "If you do not convert the layers first, `load_state_dict` decodes the codes, and warns once"
    assert says(page, "docs/inference.md", said)
    monkeypatch.setattr(writes, "TOLD", threading.Event())
    model = quire.convert(torch.nn.Linear(256, 256), "mxfp8", for_inference=True, tokens=None)
    plain = torch.nn.Linear(256, 256)
    with pytest.warns(UserWarning, match="is decoded") as caught:
        for _ in range(2):
            plain.load_state_dict(model.state_dict())
    assert len(caught) == 1 and torch.equal(plain.weight, model.weight.dequantize())


def test_pages_that_advise_the_dequantize_of_transformers_say_for_which_models(page):
    """For a model that quire.convert has converted it raises an error of transformers."""
    for name in ("docs/integrations.md", "docs/lora.md"):
        text = " ".join(page(name).text.split())
        places = [found.start() for found in re.finditer(r"model\.dequantize\(\)", text)]
        assert places
        for at in places:
            near = text[max(0, at - 200) : at + 200]
            assert "from_pretrained" in near or "`register()`" in near
            assert "quire.dequantize_weights(model)" in text[at - 300 : at + 300]


def test_the_speed_of_recipes_on_a_gpu_is_that_of_the_page_about_gpus(page):
    measured = {
        row[0]: f"{row[1]} times" for row in page("docs/benchmarks-cuda.md").rows("A training step of one layer")
    }
    told = {row[0]: row[2] for row in page("docs/which-recipe.md").rows("How the recipes differ")}
    assert told == {name: measured.get(name, "not measured") for name in told} and measured.keys() < told.keys()


def test_what_the_table_says_of_many_tokens_is_what_the_bars_show(page):
    """The table stands in README.md or on the page that explains it."""
    lines = [line for name in ("README.md", "docs/which-recipe.md") for line in page(name).text.splitlines()]
    cells = [line.strip("| ").split("|") for line in lines if line.startswith("| serve many tokens")][0]
    text = page(DIARY).text
    shown = {heading: bars.figures(heading, text) for heading in bars.CPUS}
    of_8_bits = [shown[f"Figures on Zen {n}"][name][2048] for n in (4, 5) for name in list(bars.RECIPES)[:2]]
    of_nvfp4 = [shown[f"Figures on Zen {n}"]["NVFP4BlockScaling"][2048] for n in (4, 5)]
    nvfp4, eight = cells[2].split(";")
    assert covered(eight, of_8_bits) and covered(nvfp4, of_nvfp4)
    amx = text.split("### Figures with AMX\n", 1)[1]
    other = amx.split("*Another machine*", 1)[1]
    figures = [row[-1] for part in (amx, other) for name, row in _table(part).items() if name in bars.RECIPES]
    assert covered(cells[3], [*figures, 1.20, 1.14, 1.19])  # "A second run gave"
    assert "A second run gave 1.66, 1.26, 1.20\n(FP8), 1.56, 1.07, 1.14 (MXFP8) and 1.73, 1.28, 1.19" in other


def test_the_page_that_explains_amx_says_the_figures_of_the_diary(page):
    (said,) = re.findall(r"^\* \*\*AMX\.\*\*(.*?)^(?:\*|\n)", page("docs/which-recipe.md").text, re.S | re.M)
    amx = page(DIARY).text.split("### Figures with AMX\n", 1)[1].split("\n### ", 1)[0]
    assert covered(said.split("on one machine", 1)[0], [0.85, 0.77, 0.82, 0.82, 0.88, 0.80, 0.79])
    assert "FP8 1429 (0.88),\nMXFP8 and NVFP4 1290 (0.80 and 0.79)" in amx
    training = _table(amx, "| M, training |")
    many = [row[3] for row in training.values()] + [1.00, 0.83, 0.81, 0.83, 1.01, 0.72, 0.99]
    assert "2048 tokens was 1.00 (FP8), 0.83 (128-blocks), 0.81 (MXFP8) and 0.83\n(NVFP4)" in amx
    assert "0.46, 0.48, 0.67, 1.01 (FP8),\n0.47, 0.51, 0.57, 0.72 (MXFP8), 0.70, 0.71, 0.74, 0.99 (NVFP4) for" in amx
    few = [row[1] for row in training.values()] + [0.48, 0.51, 0.71]
    tail = re.sub(r"\s+", " ", said.rpartition("Training")[2]).replace(",", "").split("and with 16 tokens")
    assert covered(tail[0], many) and covered(tail[1], few)


def _table(text: str, head: str = "| M, inference, prepacked |") -> dict[str, list[float]]:
    rows = text.split(head, 1)[1].split("\n\n", 1)[0].splitlines()
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in rows]
    return {
        name.strip("`"): [float(cell.strip("*")) for cell in row]
        for name, *row in cells
        if "Scaling`" in name and "target" not in name
    }


def test_a_converted_layer_refuses_an_input_that_needs_a_gradient(page):
    for said in (
        "an embedding, a norm, the router of a mixture, or a linear layer that was not converted.",
        'Weight-only recipes (`x=none`) and `gradients="input"` raise no error.',
    ):
        assert says(page, "docs/inference.md", said)
    fronts = torch.nn.LayerNorm(64), quire.MoE(64, 64, 2), torch.nn.Linear(64, 64)
    for front in fronts:
        for recipe, options, raises in (
            ("mxfp8", {}, True),
            ("mxfp8", {"gradients": "input"}, False),
            ("x=none,w=mxfp8", {}, False),
        ):
            model = torch.nn.Sequential(front, torch.nn.Linear(64, 64))
            quire.convert(
                model,
                recipe,
                for_inference=True,
                tokens=None,
                min_features=1,
                filter=lambda _, name: name == "1",
                **options,
            )
            with pytest.raises(RuntimeError, match="run the model under torch.no_grad") if raises else nullcontext():
                assert model(torch.randn(4, 64)).requires_grad
            with torch.no_grad():
                model(torch.randn(4, 64))


def test_a_conversion_times_linear_layers_alone(page, monkeypatch):
    assert says(page, "docs/inference.md", "It does not time experts and the other layers of quire, such as")
    monkeypatch.setattr(quire.conversion.timing, "SECONDS", 0.0)
    monkeypatch.setattr(quire.conversion.convert, "_why_slower", lambda seconds, _: dict.fromkeys(seconds, "slower"))
    for layer in (quire.MoE(256, 256, 2), quire.LayerNormLinear(256, 256)):
        quire.convert(layer, "mxfp8", for_inference=True, tokens=64)
    with pytest.raises(ValueError, match="slower"):
        quire.convert(quire.Linear(256, 256), "mxfp8", for_inference=True, tokens=64)


@pytest.mark.parametrize("kind", ["buffer", "tensor"])
def test_a_layer_whose_weight_is_no_parameter_is_converted_for_training_alone(page, kind):
    assert says(page, "docs/inference.md", "is converted for training and left by a conversion for inference")
    for inference in (False, True):
        layer = torch.nn.Linear(256, 256)
        weight = layer.weight.detach()
        del layer.weight
        if kind == "buffer":
            layer.register_buffer("weight", weight)
        else:
            layer.weight = weight
        model = torch.nn.Sequential(layer, torch.nn.Linear(256, 256))
        quire.convert(model, "mxfp8", for_inference=inference, tokens=None)
        assert isinstance(model[0], quire.Linear) != inference and isinstance(model[1], quire.Linear)


def test_loaded_weights_have_plain_order_and_decoded_ones_train_if_they_are_told_to(page, tmp_path):
    assert says(
        page, "docs/inference.md", "The loaded weights have plain order. `quire.prepack_weights(model)` gives them"
    )
    assert says(page, "docs/integrations.md", "decoded weights do not require gradients: to train them, call")
    model, other = (torch.nn.Sequential(torch.nn.Linear(256, 256)).eval() for _ in range(2))
    quire.convert(model, "nvfp4", for_inference=True, tokens=None)
    assert model[0].weight.spec_text.endswith(":interleaved")
    io.save(model, tmp_path / "model", dialect="quire")
    io.load(other, tmp_path / "model")
    assert not other[0].weight.spec_text.endswith(":interleaved")
    with torch.no_grad():
        x = torch.randn(4, 256)
        expected, loaded = model(x), other(x)
        quire.prepack_weights(other)
        assert torch.equal(loaded, expected) and torch.equal(other(x), expected)
    assert other[0].weight.spec_text == model[0].weight.spec_text
    quire.dequantize_weights(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(True)(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_explanation_runs_hooks_and_keeps_attributes_and_is_full_for_one_layer(page):
    assert says(
        page, "docs/observing.md", "Hooks run, and Python attributes that the model sets keep their new values."
    )
    assert says(page, "docs/observing.md", "If only one layer computes, the report has every step in full")
    ran = []
    model = torch.nn.Sequential(quire.Linear(64, 64, recipe="mxfp8"))
    model[0].register_forward_hook(lambda layer, *_: ran.append(setattr(layer, "note", "kept")))
    one = str(quire.explain(model, torch.randn(4, 64)))
    assert len(ran) == 1 and model[0].note == "kept"
    model.append(quire.Linear(64, 64, recipe="mxfp8"))
    assert "not asked" in one and "not asked" not in str(quire.explain(model, torch.randn(4, 64)))


def test_the_kernels_of_a_weight_only_recipe_are_those_of_the_table(page):
    assert says(page, "docs/observing.md", "or `quire::linear_unquantized_bwd` if it multiplies values (weight-only")
    layer = quire.Linear(64, 64, recipe="x=none,w=nvfp4")
    with torch.profiler.profile() as profile:
        layer(torch.randn(4, 64, requires_grad=True)).sum().backward()
    parents: dict[str, set[str]] = {}
    for event in profile.events():
        parents.setdefault(event.name, set()).add(event.cpu_parent.name if event.cpu_parent else "")
    assert parents["quire::linear_unquantized_bwd"] == {"quire::linear_backward"}
    assert parents["aten::mm"] == {"quire::linear_unquantized_bwd"} and parents["aten::addmm"] == {"quire::linear_fwd"}


def test_an_inf_reaches_the_gradients_through_the_loss_alone(page):
    assert says(page, "docs/troubleshooting.md", "If the loss becomes NaN, it spreads to dy of the layers too")
    x = torch.randn(8, 64)
    x[2, 3] = torch.inf
    for loss, reaches in ((torch.sum, False), (torch.nn.functional.mse_loss, True)):
        model = torch.nn.Sequential(quire.Linear(64, 64), torch.nn.GELU(), quire.Linear(64, 64))
        with quire.debug.statistics(model) as counts, quire.autocast(recipe="mxfp8"):
            y = model(x)
            (loss(y, torch.zeros_like(y)) if reaches else loss(y)).backward()
        bad = {(row.layer, row.role) for row in counts if row.nonfinite}
        assert {("0", "x"), ("2", "x")} <= bad and (("2", "dy") in bad) == reaches


def test_what_a_layer_and_a_checkpoint_keep(page):
    assert says(page, "docs/troubleshooting.md", "keeps only the arguments of the function.")
    assert says(
        page, "docs/troubleshooting.md", "Delayed scaling and static scales (`given`) do not allow this option."
    )

    def lives_on(run) -> bool:
        x = torch.randn(4, 64).mul(2)
        alive = weakref.ref(x)
        y = run(x)
        del x
        return alive() is not None and y is not None

    layer = quire.Linear(64, 64, recipe="mxfp8")
    assert not lives_on(layer) and lives_on(lambda x: quire.checkpoint(layer, x, use_reentrant=False))
    layer = quire.Linear(64, 64, save_original_input=True, recipe="mxfp8")
    assert lives_on(layer)
    with (
        pytest.raises(ValueError, match="save_original_input=True does not go with"),
        quire.autocast(recipe="fp8_delayed"),
    ):
        layer(torch.randn(4, 64))
    static = quire.Linear(64, 64, save_original_input=True, recipe="x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8")
    static.input_scale.fill_(0.01)
    with pytest.raises(NotImplementedError, match="given"):
        static(torch.randn(4, 64)).sum().backward()


def test_a_quantized_weight_takes_recipes_with_its_spec_alone(page):
    assert says(
        page, "docs/custom-recipes.md", "The options `nan` and `interleaved` may differ, and so may the specs of x"
    )
    model = quire.convert(torch.nn.Linear(256, 256), "nvfp4", for_inference=True, tokens=None)
    with torch.no_grad():
        for recipe in ("x=nvfp4,w=nvfp4,dy=nvfp4", "x=mxfp8,w=nvfp4:nan,dy=mxfp8"):
            with quire.autocast(recipe=recipe):
                assert model(torch.randn(4, 256)).isfinite().all()
        for recipe in ("nvfp4", "mxfp8"):
            with pytest.raises(RuntimeError, match="Recipe mismatch"), quire.autocast(recipe=recipe):
                model(torch.randn(4, 256))


class Projections(torch.nn.Module):
    """Linear layers with names that other tools know."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x):
        return self.q_proj(x) + self.k_proj(x)


def is_stored(recipe, dialect, folder):
    """Whether files of that dialect give the outputs of the models that they were written of, whatever the values."""
    for seed in range(6):
        torch.manual_seed(seed)
        model, loaded, x = Projections(), Projections(), torch.randn(64, 64)
        quire.convert(model, recipe, for_inference=True, tokens=None, min_features=1)
        for layer in model.children():
            if "input_scale" in layer.state_dict():
                layer.input_scale.fill_((seed + 1) * (0.7 if "div" in recipe else 0.007))
        try:
            io.save(model, folder / str(seed), dialect=dialect)
        except io.CheckpointError:
            return False
        io.load(loaded, folder / str(seed))
        with torch.no_grad():
            if not torch.equal(loaded(x), model(x)):
                return False
    return True


def test_dialects_store_recipes_without_loss_as_the_table_says(page, tmp_path):
    lines = page("docs/checkpoints.md").text.split("| recipe | dialects |\n", 1)[1].split("\n\n", 1)[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[1:-1]]  # the last is every recipe
    dialects = {name for _, names in rows for name in re.findall(r"`([\w-]+)`", names.split(";")[0])}
    assert len(rows) >= 12 and len(dialects) == 7
    for recipes, names in rows:
        listed = set(re.findall(r"`([\w-]+)`", names.split(";")[0]))
        for recipe in re.findall(r"`(\S+)`", recipes):
            found = {name for name in dialects if is_stored(recipe, name, tmp_path / f"{name} {recipe}")}
            assert found == listed, recipe


def test_the_first_step_of_delayed_scaling_has_scales_of_1(page):
    assert says(page, "docs/train-and-resume.md", "In the first step no amax is known, and all scales are 1.")
    torch.manual_seed(0)
    layer, x = quire.Linear(256, 256), 1e4 * torch.randn(64, 256)
    exact = layer(x)

    def error(layer, *, train):
        with quire.autocast(recipe="fp8_delayed"), torch.set_grad_enabled(train):
            return (layer(x) - exact).norm() / exact.norm()

    assert error(layer, train=True) > 0.9 and error(layer, train=True) < 0.1
    loaded = quire.Linear(256, 256)
    loaded.load_state_dict(layer.state_dict())
    assert error(loaded, train=False) > 0.9
    quire.set_delayed_state(torch.nn.Sequential(loaded), quire.delayed_state(torch.nn.Sequential(layer)))
    assert error(loaded, train=False) < 0.1


def test_a_mean_loses_all_gradients_in_the_first_step_of_delayed_scaling(page):
    assert says(page, "docs/train-and-resume.md", "the gradients of the first layers can be 0 altogether")
    torch.manual_seed(0)
    model = torch.nn.Sequential(quire.Linear(256, 512), torch.nn.GELU(), quire.Linear(512, 256))
    x, counts = torch.randn(2048, 256), []
    for _ in range(3):  # in the second step the first layer's dy has values, and its scale is 1 still
        model.zero_grad()
        with quire.autocast(recipe="fp8_delayed"):
            y = model(x)
        (1e-2 * y).square().mean().backward()
        counts.append(int(model[0].weight.grad.count_nonzero()))
    assert counts[0] == counts[1] == 0 and counts[2] > 0.9 * model[0].weight.numel()


class Embedded(torch.nn.Module):
    """Its converted layer gets an input that needs a gradient."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = torch.nn.Embedding(16, 256), torch.nn.Linear(256, 256)

    def forward(self, ids):
        return self.layer(self.embedding(ids))


def test_a_program_of_a_model_with_an_embedding_is_exported_and_called_without_gradients(page, tmp_path):
    said = "also call it under `torch.no_grad()`, before and after it was saved and loaded"
    assert says(page, "docs/inference.md", said)
    assert says(page, "docs/serve-cpp.md", 'raises an error: "w is given without columnwise_data"')
    model, ids = quire.convert(Embedded(), "mxfp8", for_inference=True, tokens=None), torch.arange(4)
    with pytest.raises(RuntimeError, match="w is given without columnwise_data"):
        torch.export.export(model, (ids,))
    with torch.no_grad():
        program, expected = torch.export.export(model, (ids,)), model(ids)
    torch.export.save(program, tmp_path / "model.pt2")
    for called in (program.module(), torch.export.load(tmp_path / "model.pt2").module()):
        with torch.no_grad():
            assert torch.equal(called(ids), expected)
        with pytest.raises(RuntimeError, match="w is given without columnwise_data"):
            called(ids)


def test_a_state_dict_of_codes_is_stored_by_torch_and_not_by_safetensors(page, tmp_path):
    error = "Attempted to access the data pointer on an invalid python storage"
    assert says(page, "docs/inference.md", f'`safetensors.torch.save_file` cannot store it: its error is "{error}"')
    state = quire.convert(torch.nn.Linear(256, 256), "mxfp8", for_inference=True, tokens=None).state_dict()
    with pytest.raises(RuntimeError, match=error):
        pytest.importorskip("safetensors.torch").save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt")["weight"].rowwise_data, state["weight"].rowwise_data)


def test_a_refit_writes_weights_whose_codes_lie_beside_them_and_not_these_codes(page):
    said = "the refit writes the high-precision weight, and not the codes beside it. Call"
    assert says(page, "docs/inference.md", said)

    def served(state=None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        model.load_state_dict(state or model.state_dict())
        quire.convert(model, "mxfp8", lambda module, name: name == "0", for_inference=True, tokens=None)
        return quire.quantize_weights(quire.convert(model, "mxfp8", lambda module, name: name == "1"), "mxfp8")

    model, x = served(), torch.randn(3, 256)
    new = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)).state_dict()
    quire.refit(model, new)
    assert torch.equal(model[1].weight, new["1.weight"])
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="its cached codes are stale"):
            model(x)
        assert torch.equal(quire.quantize_weights(model, "mxfp8")(x), served(new)(x))


def test_which_recipes_of_an_autocast_train_adapters_on_converted_layers(page):
    said = "Only a weight-only recipe with the same weight format works, such as `x=none,w=nvfp4` for layers of `nvfp4`"
    assert says(page, "docs/lora.md", said)
    layer = quire.convert(torch.nn.Linear(256, 256), "nvfp4", for_inference=True, tokens=None, gradients="input")
    x = torch.randn(4, 256, requires_grad=True)
    with quire.autocast(recipe="x=none,w=nvfp4"):
        layer(x).sum().backward()
    assert x.grad.any()
    for recipe, error in {
        "x=none,w=mxfp8": "Recipe mismatch for the weight.*leave quire.autocast",
        "nvfp4": "the recipe of quire.autocast, NVFP4BlockScaling, replaces the recipe of this layer",
        "mxfp8": "needs w with columnwise_data.*run the model outside of quire.autocast",
    }.items():
        with pytest.raises(RuntimeError, match=error), quire.autocast(recipe=recipe):
            layer(x)


def test_a_conversion_freezes_adapters_that_are_there_before_unless_a_filter_leaves_them(page):
    assert says(page, "docs/lora.md", "The conversion also quantizes and freezes adapters that are there before")
    assert says(page, "docs/lora.md", "do not require gradients, unless you or peft set it")

    def trained(**options):
        layers = {"layer": torch.nn.Linear(256, 512), "down": torch.nn.Linear(256, 256)}
        model = torch.nn.ModuleDict({**layers, "up": torch.nn.Linear(256, 512), "small": torch.nn.Linear(256, 8)})
        quire.convert(model, "nvfp4", for_inference=True, tokens=None, gradients="input", **options)
        return model, {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad}

    model, names = trained()
    assert names == {"small"}
    assert trained(filter=lambda module, name: name not in ("down", "up"))[1] == {"down", "up", "small"}
    model.requires_grad_(True)
    model["layer"](torch.randn(3, 256)).sum().backward()
    assert model["layer"].weight.grad.any() and model["layer"].bias.grad.any()
