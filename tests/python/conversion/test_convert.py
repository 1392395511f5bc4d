"""torch.nn.Linear layers become quire.Linear: which, what stays, what is said."""

import copy
import io
import pickle
import sys
import time

import pytest
import torch

import quire
from every_feature import LAYERS
from quire import recipe as recipes
from quire.tensor.writes import SAME_LAYERS
from steps import assert_of_codes, blocks, call

pytestmark = pytest.mark.any_device

NVFP4 = recipes.NVFP4BlockScaling()


def bits(tensor):
    return tensor.detach().clone().view(torch.int32)


def reasons(model):
    return {name: layer.why_not for layer in quire.conversion_report(model).left for name in layer.names}


# ---------------------------------------------------------------- what stays


def test_layers_stay_the_same_objects_with_parameters_hooks_flags_and_state_dict():
    model = blocks(dtype=torch.bfloat16)
    model[1].eval()
    model[0].up.weight.requires_grad_(False)
    calls = []
    model[0].up.register_forward_hook(lambda *_: calls.append("forward"))
    before_modules, before = dict(model.named_modules()), dict(model.named_parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert quire.convert(model, NVFP4) is model

    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert all(module is before_modules[name] for name, module in model.named_modules())
    assert all(type(module) is quire.Linear for module in (model[0].up, model[0].down, model[1].up, model[1].down))
    assert [model[0].up.training, model[1].up.training] == [True, False]
    assert not model[0].up.weight.requires_grad and model[0].up.weight.dtype == torch.bfloat16
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model(torch.randn(4, 256, dtype=torch.bfloat16))
    assert calls == ["forward"]
    blocks(dtype=torch.bfloat16).load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(state, strict=True)


def test_an_optimizer_made_before_goes_on_and_trains_as_layers_that_were_quires_from_the_start():
    model, twin = blocks(), blocks()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    quire.convert(model, "mxfp8")
    for block in twin:
        for name in ("up", "down"):
            old = getattr(block, name)
            new = quire.Linear(old.in_features, old.out_features, bias=old.bias is not None)
            new.weight, new.bias = old.weight, old.bias
            setattr(block, name, new)
    x, losses = torch.randn(32, 256), []
    for _ in range(3):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            with quire.autocast(m is twin, recipe=recipes.MXFP8BlockScaling()) if m is twin else torch.enable_grad():
                loss = (m(x) - x.flip(0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[0::2] == losses[1::2] and losses[4] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_module_with_two_names_stays_one_and_needs_both_accepted():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = torch.nn.Linear(256, 256)
            self.other = torch.nn.Linear(256, 256)

    model = quire.convert(Model(), NVFP4, lambda module, name: name != "second")
    assert reasons(model) == dict.fromkeys(["first", "second"], "the filter says so")
    assert type(model.first) is torch.nn.Linear
    model = quire.convert(Model(), NVFP4)
    assert model.first is model.second and type(model.first) is quire.Linear
    assert [layer.names for layer in quire.conversion_report(model).converted] == [("first", "second"), ("other",)]


def test_a_weight_tied_to_an_embedding_stays_tied_through_a_step():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(320, 256), torch.nn.Linear(256, 320, bias=False)
            self.head.weight = self.embedding.weight

    model = quire.convert(Model(), NVFP4)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.head.weight.detach().clone()
    assert len(list(model.parameters())) == 1
    model.head(model.embedding(torch.arange(32))).square().mean().backward()
    optimizer.step()
    assert model.head.weight is model.embedding.weight and not torch.equal(model.head.weight, before)


def test_the_model_itself_may_be_the_layer():
    layer = torch.nn.Linear(256, 512)
    weight = layer.weight
    assert quire.convert(layer, NVFP4) is layer and type(layer) is quire.Linear and layer.weight is weight
    assert quire.conversion_report(layer).converted[0].names == ("",)
    assert "(the model)" in str(quire.conversion_report(layer))


@pytest.mark.cpu_only
def test_on_the_meta_device_layers_convert_and_get_values_and_random_state_later():
    trained, model = blocks(), quire.convert(blocks(device="meta"), NVFP4)
    assert model[0].up.weight.is_meta and model[0].up.sr_state.is_meta
    model.to_empty(device="cpu")
    model.load_state_dict(trained.state_dict())
    x = torch.randn(16, 256)
    with torch.no_grad():
        y = model[0].up(x)
    assert_of_codes(y, trained[0].up, x, NVFP4)
    model(x).sum().backward()
    assert quire.rng_state(model)["0.up"][1] == 1


def test_every_layer_rounds_by_a_seed_of_its_own():
    model = blocks()
    generator = torch.random.get_rng_state()
    quire.convert(model, NVFP4)
    assert torch.equal(torch.random.get_rng_state(), generator)
    seeds = [state.tolist() for state in quire.rng_state(model).values()]
    assert len({seed for seed, _ in seeds}) == 4 and all(counter == 0 for _, counter in seeds)
    again = quire.convert(blocks(), NVFP4)
    assert [state.tolist() for state in quire.rng_state(again).values()] == seeds


def test_copies_and_pickles_keep_recipe_and_report():
    model = quire.convert(blocks(), NVFP4)
    x = torch.randn(8, 256)
    with torch.no_grad():
        y = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(bits(twin(x)), bits(y))
            assert twin[0].up.weight is not model[0].up.weight and twin[0].up.recipe == NVFP4
            assert quire.conversion_report(twin) == quire.conversion_report(model)


# ---------------------------------------------------------------- which


def left_alone():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    patched = torch.nn.Linear(256, 256)
    patched.forward = lambda x, run=patched.forward: run(x) + 1
    return {
        "Scaled is a subclass of torch.nn.Linear, and may compute something else": Scaled(256, 256),
        "its forward was replaced, and would not run quire.Linear's": patched,
        "its weight is float64, not float32, float16 or bfloat16": torch.nn.Linear(256, 256).double(),
        "too small to gain, in_features < 256": torch.nn.Linear(255, 256),
        "too small to gain, out_features < 256": torch.nn.Linear(256, 2),
    }


def test_what_cannot_gain_is_left_alone_and_the_report_says_why():
    layers = left_alone()
    types = [type(layer) for layer in layers.values()]
    model = quire.convert(torch.nn.Sequential(*layers.values(), torch.nn.Linear(256, 256), torch.nn.ReLU()), NVFP4)
    assert reasons(model) == {str(i): why for i, why in enumerate(layers)}
    assert [type(layer) for layer in model] == [*types, quire.Linear, torch.nn.ReLU]
    report = quire.conversion_report(model)
    assert [layer.names for layer in report.converted] == [("5",)] and report.recipe == NVFP4.linear_spec()


def test_min_features_moves_the_limit():
    model = quire.convert(torch.nn.Sequential(torch.nn.Linear(16, 3), torch.nn.Linear(2, 16)), min_features=3)
    assert reasons(model) == {"1": "too small to gain, in_features < 3"}


def test_what_the_filter_leaves_is_no_warning_and_stands_in_the_report(recwarn):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    quire.convert(model, NVFP4, lambda module, name: name == "0")
    assert not [one for one in recwarn if "high precision" in str(one.message)]
    assert "in high precision, 50.0 %" in str(quire.conversion_report(model))


@pytest.mark.parametrize("change", ["convert", "quantize_weights", "dequantize_weights", "quantize_model"])
def test_what_changes_a_model_returns_it(change):
    model = blocks()
    if change in ("quantize_weights", "dequantize_weights"):
        quire.convert(model, "mxfp8", for_inference=change == "dequantize_weights", tokens=None)
    assert getattr(quire, change)(model, *["mxfp8"] * (change != "dequantize_weights")) is model


def test_the_filter_sees_every_linear_with_its_name():
    seen = {}
    model = quire.convert(blocks(), NVFP4, lambda module, name: seen.setdefault(name, module) and "up" in name)
    assert seen == {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert reasons(model) == dict.fromkeys(["0.down", "1.down"], "the filter says so")


def test_nothing_to_convert_is_an_error_that_says_what_was_looked_at_and_changes_nothing():
    model = blocks()
    with pytest.raises(
        ValueError, match=r"none of the 4 .* of Sequential qualifies(.|\n)*  \*\.down .* x 2  left: the filt"
    ):
        quire.convert(model, NVFP4, lambda module, name: False)
    assert type(model[0].up) is torch.nn.Linear
    with pytest.raises(ValueError, match=r"was not converted.*print\(model\) shows the recipe"):
        quire.conversion_report(model)
    with pytest.raises(ValueError, match="Conv2d has no torch.nn.Linear"):
        quire.convert(torch.nn.Conv2d(3, 3, 3), NVFP4)


def test_the_remedy_follows_the_reason():
    with pytest.raises(ValueError, match=r"qualifies\. Pass another filter\n"):
        quire.convert(blocks(), NVFP4, lambda module, name: False)
    with pytest.raises(ValueError, match=r"does not qualify\. Pass a smaller min_features\n"):
        quire.convert(torch.nn.Linear(8, 8), NVFP4)
    with pytest.raises(ValueError, match=r"qualifies\. Call model\.float\(\) or model\.bfloat16\(\) first\n"):
        quire.convert(blocks().double(), NVFP4)
    model = quire.convert(blocks(), "mxfp8", for_inference=True, tokens=None)
    for options in ({}, {"for_inference": True, "tokens": None}):
        with pytest.raises(
            ValueError, match=r"qualifies\. Call quire\.dequantize_weights\(model\) first, or convert the "
        ):
            quire.convert(model, NVFP4, **options)
    quire.dequantize_weights(model)
    quire.convert(model, NVFP4)


def test_an_error_within_the_filter_says_how_it_is_called():
    with pytest.raises(TypeError) as caught:
        quire.convert(blocks(), NVFP4, lambda name, module: "up" in name)
    assert "in filter(module, name)" in caught.value.__notes__[0]


def test_a_model_under_another_recipe_than_its_own_weights_says_what_to_do():
    model = quire.convert(blocks(), "mxfp8", for_inference=True, tokens=None)
    with pytest.raises(RuntimeError, match="leave quire.autocast, or convert the original model"):
        with quire.autocast(recipe=NVFP4):
            model(torch.randn(2, 256))


def test_arguments_of_a_wrong_kind_are_named_and_change_nothing():
    model = blocks()
    with pytest.raises(TypeError, match="convert: model must be a torch.nn.Module, got a list"):
        quire.convert([model], NVFP4)
    for converts in (quire.convert, quire.quantize_model):
        name = converts.__name__
        with pytest.raises(TypeError, match=f"^{name}: filter must be a function"):
            converts(model, NVFP4, filter=["lm_head"])
        for wrong in ("a", None, 1.5, True):
            with pytest.raises(TypeError, match=f"^{name}: min_features must be an int, got {wrong!r}"):
                converts(model, NVFP4, min_features=wrong)
        with pytest.raises(ValueError, match=f"^{name}: min_features must be at least 0, got -1"):
            converts(model, NVFP4, min_features=-1)
    with pytest.raises(TypeError, match="^convert: tokens must be an int, got True"):
        quire.convert(model, NVFP4, for_inference=True, tokens=True)
    with pytest.raises(TypeError, match="^conversion_report: model must be a torch.nn.Module, got None"):
        quire.conversion_report(None)
    with pytest.raises(ValueError, match="there is no recipe 'nvpf4'.*did you mean 'nvfp4'"):
        quire.convert(model, "nvpf4")

    def failing(module, name):
        if name == "1.up":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        quire.convert(model, NVFP4, failing)
    assert all(type(layer) is torch.nn.Linear for block in model for layer in block.children())


# ---------------------------------------------------------------- what is said


def test_the_report_is_a_table_of_layers_alike():
    model = torch.nn.Sequential(blocks(3), torch.nn.Linear(256, 2))
    assert str(quire.conversion_report(quire.convert(model, "mxfp8"))).splitlines() == [
        "Sequential: 6 of 7 linear layers are quire's",
        "recipe: x=mxfp8:nan,w=mxfp8:nan,dy=mxfp8:nan",
        "  *.*.up    256 -> 512 x 3",
        "  *.*.down  512 -> 256 x 3",
        "  1         256 -> 2  left: too small to gain, out_features < 256",
        "in high precision, 0.1 % of the weights that matmuls may read:",
        "  1.weight  [2, 256] of Linear: 0.1 %",
    ]


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_report_shows_what_lies_between_two_matmuls(activation):
    model = torch.nn.Sequential(quire.LayerNormMLP(512, 256, activation=activation), torch.nn.Linear(512, 512))
    quire.convert(model, "mxfp8")
    assert [layer.inner_features for layer in quire.conversion_report(model).layers] == [256, None]
    assert "  0  512 -> 256 -> 512\n  1  512 -> 512" in str(quire.conversion_report(model))


def test_the_report_of_decoded_weights_has_no_recipe_and_no_memory():
    model = quire.convert(blocks(2), "nvfp4", for_inference=True, tokens=None)
    quire.dequantize_weights(model[0])
    half = quire.conversion_report(model)
    assert [layer.recipe is None for layer in half.layers] == [True, True, False, False]
    assert [layer.for_inference for layer in half.layers] == [False, False, True, True]
    assert half.recipe is not None and "memory" not in str(half)
    assert str(half).endswith("note: 2 layers have no recipe any more, as after quire.dequantize_weights")
    quire.dequantize_weights(model[1])
    for each in (model, copy.deepcopy(model)):
        assert str(quire.conversion_report(each)).splitlines() == [
            "Sequential: 4 of 4 linear layers are quire's",
            "recipe: that of quire.autocast, if there is one",
            "  *.up    256 -> 512 x 2",
            "  *.down  512 -> 256 x 2",
            "note: 4 layers have no recipe any more, as after quire.dequantize_weights",
        ]
    quire.convert(model, "nvfp4", for_inference=True, tokens=None)
    assert "memory" in str(quire.conversion_report(model)) and not quire.conversion_report(model).notes


def test_a_decoded_weight_is_not_called_untied():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(512, 256), "head": torch.nn.Linear(256, 512, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.warns(UserWarning, match="head.weight shared memory with embed.weight"):
        quire.convert(model, "nvfp4", for_inference=True, tokens=None)
    assert "shared memory" in str(quire.conversion_report(model))
    quire.dequantize_weights(model)
    assert "shared memory" not in str(quire.conversion_report(model))


def test_the_report_of_a_second_conversion_has_the_layers_of_the_first():
    model = quire.convert(blocks(2), NVFP4)
    quire.convert(model, "mxfp8", lambda module, name: name == "1.up")
    report = quire.conversion_report(model)
    text = {name: layer.recipe for layer in report.converted for name in layer.names}
    nvfp4, mxfp8 = NVFP4.linear_spec(), recipes.MXFP8BlockScaling().linear_spec()
    assert text == {"0.up": nvfp4, "0.down": nvfp4, "1.up": mxfp8, "1.down": nvfp4} and not report.left
    assert f"*.down  512 -> 256 x 2  recipe: {nvfp4}  unchanged by the last conversion: the filter says so" in str(
        report
    )
    assert str(report).splitlines()[1] == f"recipe: {mxfp8}, of the last conversion"
    model[0].up.recipe = None  # as of a layer that was made without one
    quire.convert(model, "mxfp8", lambda module, name: name == "1.up")
    said = "  recipe: that of quire.autocast, if there is one  unchanged by the last conversion: the filter says so"
    assert f"256 -> 512{said}" in str(quire.conversion_report(model))


def test_the_memory_of_a_second_conversion_is_that_of_before_it():
    model = quire.convert(blocks(2), NVFP4, lambda module, name: name != "1.up", for_inference=True, tokens=None)
    before, now = quire.conversion_report(model).nbytes
    assert "MB before, " in str(quire.conversion_report(model))
    quire.convert(model, "mxfp8", lambda module, name: name == "1.up", for_inference=True, tokens=None)
    report = quire.conversion_report(model)
    assert before > now == report.nbytes[0] > report.nbytes[1]
    assert f"memory: {now / 1e6:.3g} MB before the last conversion, " in str(report)


def test_an_error_names_parameters_that_are_of_no_layer_as_a_report_does():
    attention = torch.nn.MultiheadAttention(256, 4)
    in_high_precision = [
        "in high precision, 100.0 % of the weights that matmuls may read:",
        "  in_proj_weight   [768, 256] of MultiheadAttention: 75.0 %",
        "  out_proj.weight  [256, 256] of NonDynamicallyQuantizableLinear: 25.0 %",
    ]
    with pytest.raises(ValueError, match="nothing to convert") as raised:
        quire.convert(attention, "mxfp8")
    assert str(raised.value).splitlines()[2:] == in_high_precision
    with pytest.raises(ValueError, match="Experts has no torch.nn.Linear") as raised:
        quire.convert(Experts(), "mxfp8")
    assert str(raised.value).splitlines()[1:] == [
        "in high precision, 100.0 % of the weights that matmuls may read:",
        "  weights  [4, 256, 256] of Experts: 100.0 %",
    ]
    with pytest.raises(ValueError, match="nothing to convert") as raised:
        quire.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "mxfp8")
    assert "in high precision" not in str(raised.value)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(4, 256, 256))


class Mixture(torch.nn.Module):
    """Experts as one parameter a projection, as mixtures of Hugging Face's transformers have them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(50, 256), torch.nn.Linear(256, 50, bias=False)
        self.attention, self.norm = torch.nn.Linear(256, 256), torch.nn.LayerNorm(256)
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 256, 512))
        self.down_proj = torch.nn.Parameter(torch.zeros(4, 256, 256))


def test_weights_that_no_linear_layer_has_are_not_left_without_a_word():
    most = r"92.4 % of the weights .* most in gate_up_proj \[4, 256, 512\] of Mixture"
    with pytest.warns(UserWarning, match=f"{most}; see quire.conversion_report"):
        model = quire.convert(Mixture(), "mxfp8")
    report = quire.conversion_report(model)
    total = 4 * 256 * 768 + 256 * 256 + 50 * 256
    expected = {"gate_up_proj": 4 * 256 * 512, "down_proj": 4 * 256 * 256, "head.weight": 50 * 256}
    assert {p.names[0]: p.share for p in report.parameters} == {n: count / total for n, count in expected.items()}
    assert "  gate_up_proj  [4, 256, 512] of Mixture: 60.6 %" in str(report)
    assert "conversion_report" not in str(report)  # only the warning names the report
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_weight_that_an_embedding_shares_with_a_layer_is_not_called_left():
    model = Mixture()
    model.head = torch.nn.Linear(256, 256, bias=False)
    model.embedding.weight = model.head.weight
    with pytest.warns(UserWarning, match="in high precision"):
        report = quire.conversion_report(quire.convert(model, "mxfp8"))
    assert {name for p in report.parameters for name in p.names} == {"gate_up_proj", "down_proj"}


def test_a_layer_of_quire_is_not_called_left():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), quire.GroupedLinear(4, 256, 256), torch.nn.ReLU())
    assert quire.conversion_report(quire.convert(model[:2], "mxfp8")).parameters == ()
    assert quire.conversion_report(quire.convert(model[:2], "mxfp8")).converted


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "converted"])
def test_no_layer_of_quire_is_left_without_the_recipe(name, equal_bits):
    x = torch.randn(24, 64)
    torch.manual_seed(0)
    layer = LAYERS[name]()
    with quire.autocast(recipe="mxfp8"):
        expected = call(layer, x)
    assert not equal_bits(call(layer, x), expected)
    torch.manual_seed(0)
    assert equal_bits(call(LAYERS[name](recipe="mxfp8"), x), expected)
    report = quire.conversion_report(quire.convert(torch.nn.Sequential(layer), "mxfp8"))
    assert equal_bits(call(layer, x), expected)
    assert report.converted and all(its.recipe for its in report.converted)


def test_the_filter_that_errors_propose_finds_the_layers_that_were_converted(equal_bits):
    def converted(model, **options):
        return quire.convert(model, "mxfp8", for_inference=True, tokens=None, **options)

    def made():
        small = torch.nn.Sequential(quire.LayerNormMLP(64, 96), torch.nn.Linear(64, 64), torch.nn.Linear(64, 48))
        return torch.nn.ModuleDict({"layers": small, "experts": quire.GroupedLinear(2, 48, 32)})

    saved = converted(made(), min_features=1, filter=lambda layer, name: name != "layers.1")
    state_dict = saved.state_dict()
    with torch.device("meta"):
        model = made()
    options = eval(f"dict({SAME_LAYERS})", {"quire": quire, "state_dict": state_dict})
    converted(model, **options).load_state_dict(state_dict, assign=True)
    x = torch.randn(3, 64)
    with torch.no_grad():
        found, expected = [each["experts"](each["layers"](x), [1, 2]) for each in (model, saved)]
    assert equal_bits(found, expected)
    assert type(model["layers"][1]) is torch.nn.Linear and type(model["layers"][2]) is quire.Linear

    state_dict = converted(torch.nn.Linear(64, 64), min_features=1).state_dict()  # the model is the layer
    options = eval(f"dict({SAME_LAYERS})", {"quire": quire, "state_dict": state_dict})
    assert type(converted(torch.nn.Linear(64, 64), **options)) is quire.Linear


def test_a_compiled_model_passes_its_report_on():
    model = quire.convert(blocks(), NVFP4)
    assert quire.conversion_report(torch.compile(model)) is quire.conversion_report(model)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_bar_shows_where_someone_watches_and_it_takes_long(stream, monkeypatch):
    adopt = quire.Linear.adopt

    def slowly(layer, recipe):
        time.sleep(0.3)
        return adopt(layer, recipe)

    monkeypatch.setattr(quire.Linear, "adopt", slowly)
    monkeypatch.setattr(sys, "stderr", stream())
    quire.convert(blocks(3), NVFP4)
    assert ("quire.convert:" in sys.stderr.getvalue()) == (stream is Terminal)


@pytest.mark.cpu_only
def test_layers_that_torch_computes_past_are_noted():
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True).eval()
    with pytest.warns(UserWarning, match="may compute past its layers"):
        quire.convert(layer, NVFP4)
    assert "mha.set_fastpath_enabled" in quire.conversion_report(layer).notes[0]
    x = torch.randn(2, 8, 256)
    try:
        for enabled, products in ((True, 0), (False, 2)):  # if the first fails, PyTorch has changed: drop the note
            torch.backends.mha.set_fastpath_enabled(enabled)
            with torch.no_grad():
                explained = quire.explain(layer, x)
            assert len([step for step in explained.products if step.operation == "gemm"]) == products
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_lines_with_one_name_for_their_layers_say_the_numbers():
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    quire.convert(model, "mxfp8", filter=lambda layer, name: name not in ("0", "5"))
    names = [line.split()[0] for line in str(quire.conversion_report(model)).splitlines() if line.startswith("  ")]
    assert names[:2] == ["{1-4}", "{0,5}"]
    quire.convert(model, "mxfp8")
    assert "  *  256 -> 256 x 6" in str(quire.conversion_report(model))
