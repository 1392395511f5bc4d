"""Static scales of inputs from quire.calibrate to layers, files and exported programs, against amaxes taken by hand."""

import copy
import io as files
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

import quire
from python.io.checkpoint_files import raw
from python.quantization.scales_of_amax import F32, SCALES
from quire import io

pytestmark = pytest.mark.any_device

FP8 = "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8"


class Attention(nn.Module):
    """q, k and v have the same input; v is called with another one too."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))
        return y + self.v(3 * y)


@torch.no_grad()
def amaxes(model: Attention, batches: list[torch.Tensor]) -> dict[str, float]:
    """The largest magnitude of each layer's inputs while the model runs: v is called with x, as q is, and beside it."""
    found = {}
    for x in batches:
        q, k, v = model.q(x), model.k(x), model.v(x)
        h = torch.tanh(q) * k + v
        for name, t in (("q", x), ("o", h), ("v", 3 * model.o(h))):
            found[name] = max(found.get(name, 0.0), float(t.abs().max()))
    return found


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Attention().requires_grad_(False)


@pytest.fixture
def batches():
    random = torch.Generator().manual_seed(1)
    return [torch.randn(5, 64, generator=random), 4 * torch.randn(9, 2, 64, generator=random).transpose(0, 1)]


def convert(model: nn.Module, recipe: str) -> nn.Module:
    return quire.convert(model, recipe, for_inference=True, tokens=None, min_features=1)


def scales_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b for name, b in model.named_buffers() if name.endswith("input_scale")}


@pytest.mark.parametrize("x", SCALES)
def test_apply_gives_each_layer_the_scale_of_its_own_recipe(x, model, batches):
    expected = amaxes(model, batches)
    expected |= {"k": expected["q"]}
    report = quire.calibrate(model, batches, "nvfp4", shared=False)
    expected["v"] = max(expected["v"], expected["q"])
    convert(model, f"x={x},w=mxfp8,dy=mxfp8")
    assert report.apply(model) is model
    for name, amax in expected.items():
        scale = getattr(model, name).input_scale
        assert scale.dtype == torch.float32 and scale.shape == (1,)
        assert scale.item() == SCALES[x](F32(amax))
    exact = float(max(b.abs().max() for b in batches))
    assert model.q.input_scale.item() == SCALES[x](F32(exact))
    with torch.no_grad():
        assert bool(model(batches[0]).isfinite().all())


def test_layers_with_the_same_input_share_a_scale_by_option(model, batches):
    expected = amaxes(model, batches)
    shared, own = (quire.calibrate(model, batches, FP8, shared=shared) for shared in (True, False))
    convert(model, FP8)
    shared.apply(model)
    assert model.q.input_scale == model.k.input_scale == model.v.input_scale
    assert model.q.input_scale.item() == F32(max(expected["q"], expected["v"])) / F32(448)
    own.apply(model)
    assert model.q.input_scale == model.k.input_scale < model.v.input_scale


@pytest.mark.filterwarnings("ignore:quire.Linear. its weight is quantized, and decoded")
def test_one_call_quantizes_calibrates_and_applies(model, batches):
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    assert quire.quantize_model(model, FP8, batches) is model
    report = quire.calibrate(other, batches, FP8)
    report.apply(convert(other, FP8))
    assert scales_of(model).keys() == scales_of(other).keys() == {f"{name}.input_scale" for name in "qkvo"}
    assert all(torch.equal(scale, scales_of(other)[name]) for name, scale in scales_of(model).items())
    # A model whose layers wait for a scale is calibrated with what its weights decode to.
    convert(third, FP8)
    quire.calibrate(third, batches, FP8, shared=False).apply(third)
    assert third.q.input_scale == largest(torch.cat([b.flatten() for b in batches])) / F32(448)
    with torch.no_grad():
        assert torch.equal(model(batches[0]), other(batches[0]))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_calibrated_eagerly(in_place, model, batches):
    expected = quire.calibrate(model, batches, FP8).input_scales
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    if in_place:
        model.compile(fullgraph=True, backend="eager")
        compiled = model
    with torch.no_grad():
        compiled(batches[0])
    assert quire.calibrate(compiled, batches, FP8).input_scales == expected
    quire.quantize_model(compiled, FP8, batches)
    assert model.q.input_scale.item() == F32(expected["q"])


def loaded(model: Attention, into: Attention) -> Attention:
    file = files.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    convert(into, FP8).load_state_dict(torch.load(file), assign=True)
    return into


def test_scales_go_wherever_the_model_goes(model, batches, compiler):
    quire.quantize_model(model, FP8, batches)
    x = batches[0]
    with torch.no_grad():
        y = model(x)
        with torch.device("meta"):
            empty = Attention()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded(model, empty)):
            assert torch.equal(other(x), y)
        assert torch.equal(compiler(model)(x), y)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        assert torch.equal(program.module()(x), y)
    with torch.inference_mode():
        assert torch.equal(model(x), y)
    # Other scales in the same graph.
    quire.calibrate(model, [x / 8], FP8).apply(model)
    with torch.no_grad():
        assert torch.equal(compiler(model)(x), model(x)) and not torch.equal(model(x), y)


FILES = {
    ("modelopt", FP8): ("input_scale", lambda amax: amax / F32(448)),
    ("modelopt", "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8"): (
        "input_scale",
        lambda amax: amax / F32(2688),
    ),
    ("compressed-tensors", FP8): ("input_scale", lambda amax: amax / F32(448)),
    ("compressed-tensors", "x=nvfp4:global=div:given,w=nvfp4:global=div,dy=mxfp8"): (
        "input_global_scale",
        lambda amax: F32(2688) / amax,
    ),
    ("deepseek", FP8): ("activation_scale", lambda amax: amax / F32(448)),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize(("dialect", "recipe"), FILES, ids=str)
def test_files_have_the_scales_and_give_the_same_bits(dialect, recipe, model, batches, tmp_path):
    name, scale = FILES[dialect, recipe]
    amax = F32(amaxes(model, batches)["o"])
    quire.quantize_model(model, recipe, batches)
    assert not io.save(model, tmp_path / "a", dialect=dialect).notes
    kind, _, content = raw(tmp_path / "a")[f"o.{name}"]
    assert kind == "F32" and content == model.o.input_scale.numpy().tobytes() == scale(amax).tobytes()
    with torch.device("meta"):
        other = Attention()
    io.load(other, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(other(batches[0]), model(batches[0]))
    assert other.o.recipe.input_spec == model.o.recipe.input_spec
    io.save(other, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(tmp_path / "a")


class Layers(nn.Module):
    """Every layer of quire that computes the input of its matmuls itself, or has groups."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.first = quire.LayerNormLinear(64, 64)
        self.mlp = quire.LayerNormMLP(64, 96, activation="swiglu", normalization="RMSNorm")
        self.grouped = quire.GroupedLinear(3, 64, 64, **options)
        single = {"single_grouped_weight": True} if options else {}
        self.moe = quire.MoE(64, 32, 4, 2, shared_ffn_hidden_size=48, **single)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.grouped(self.mlp(self.first(x)), [len(x) - 2, 0, 2]))


def largest(t: torch.Tensor) -> float:
    return float(t.detach().abs().max()) if t.numel() else 0.0


def gated(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return nn.functional.silu(gate) * up


def inputs_by_hand(model: Layers, x: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Amaxes of the inputs of matmuls."""
    x, p = x.to(dtype), {name: value.to(dtype) for name, value in model.named_parameters()}
    single = "grouped.weight" in p

    def of(name: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = p[f"{name}.weight"][group] if f"{name}.weight" in p else p[f"{name}.weight{group}"]
        return weight, p.get(f"{name}.bias{group}", p[f"{name}.bias"][group] if f"{name}.bias" in p else 0)

    first = nn.functional.layer_norm(x, (64,), p["first.layer_norm_weight"], p["first.layer_norm_bias"], 1e-5)
    y = first @ p["first.weight"].T + p["first.bias"]
    normed = nn.functional.rms_norm(y, (64,), p["mlp.layer_norm_weight"], 1e-5)
    h = gated(normed @ p["mlp.fc1_weight"].T + p["mlp.fc1_bias"])
    y = h @ p["mlp.fc2_weight"].T + p["mlp.fc2_bias"]
    found = {"first": largest(first), "mlp.fc1": largest(normed), "mlp.fc2": largest(h)}
    rows = y.split([len(x) - 2, 0, 2])
    found |= {f"grouped[{group}]": largest(one) for group, one in enumerate(rows)}
    y = torch.cat([one @ of("grouped", group)[0].T + of("grouped", group)[1] for group, one in enumerate(rows)])
    found["moe.shared_fc1"] = largest(y)
    found["moe.shared_fc2"] = largest(gated(y @ p["moe.shared_fc1.weight"].T))
    chosen = (y @ p["moe.router.weight"].T).topk(2).indices
    for e in range(4):
        tokens = y[(chosen == e).any(-1)]
        found[f"moe.fc1[{e}]"] = largest(tokens)
        found[f"moe.fc2[{e}]"] = largest(gated(tokens @ of("moe.fc1", e)[0].T))
    assert single == ("moe.fc1.weight" in p)
    return found


@pytest.mark.parametrize("single", [False, True])
def test_layers_that_compute_their_inputs_have_scales_of_these(single):
    torch.manual_seed(2)
    model = Layers(single_grouped_weight=True, single_grouped_bias=True) if single else Layers()
    batches = [torch.randn(7, 64), 3 * torch.randn(4, 64)]
    before = copy.deepcopy(model.state_dict())
    report = quire.calibrate(model, batches, FP8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    each = [inputs_by_hand(model, x, torch.float64) for x in batches]
    expected = {name: max(one[name] for one in each) for name in each[0]}
    in_float32 = [inputs_by_hand(model, x, torch.float32) for x in batches]
    # What rounding to float32 changes by PyTorch's operators, of any amax: quire's sums have another order.
    error = max(abs(a[name] - b[name]) / (b[name] or 1) for a, b in zip(in_float32, each, strict=True) for name in a)
    assert set(report.uncalibrated) == {name for name, amax in expected.items() if not amax} >= {"grouped[1]"}
    assert report.input_scales.keys() == {name for name, amax in expected.items() if amax}
    for layer in report.layers:
        assert layer.amax == pytest.approx(expected[layer.name], rel=4 * error), layer.name
    quire.convert(model, FP8, for_inference=True, tokens=None)
    with pytest.raises(ValueError, match=r"no amax was measured for grouped\[1\].*missing_input_scale='max'"):
        report.apply(model)
    assert model.first.input_scale.isnan().all()
    report.apply(model, missing_input_scale="max")
    scale = report.input_scales
    assert model.first.input_scale.item() == F32(scale["first"])
    assert model.mlp.fc1_input_scale.item() == F32(scale["mlp.fc1"])
    assert model.mlp.fc2_input_scale.item() == F32(scale["mlp.fc2"])
    most = max(scale["grouped[0]"], scale["grouped[2]"])
    assert model.grouped.input_scale.tolist() == [F32(scale["grouped[0]"]), F32(most), F32(scale["grouped[2]"])]
    with torch.no_grad():
        assert bool(model(batches[0]).isfinite().all())


def test_a_blocks_gptq_uses_the_static_scales(model, batches):
    torch.manual_seed(3)
    chain = nn.Sequential(*(Attention() for _ in range(3))).requires_grad_(False)
    report = quire.calibrate(chain, batches, FP8)
    other = report.apply(convert(copy.deepcopy(chain), FP8))
    quire.quantize_model(chain, FP8, batches, "gptq")
    assert all(torch.equal(scale, scales_of(other)[name]) for name, scale in scales_of(chain).items())
    assert len(scales_of(chain)) == 12
    with torch.no_grad():
        assert not torch.equal(chain(batches[0]), other(batches[0]))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda m, r: r.apply(m), ValueError, "no layer of Attention has a recipe with a static scale of x"),
        (lambda m, r: r.apply(convert(m, FP8), missing_input_scale="dynamic"), ValueError, "one of raise, max"),
        (lambda m, r: r.apply("model"), TypeError, "model must be"),
        (lambda m, r: r.apply(convert(m, FP8).to("meta")), ValueError, "on the meta device"),
        (
            lambda m, r: r.apply(nn.Sequential(convert(m, FP8))),
            ValueError,
            "no amax was measured for 0.q, 0.k.*by filter=$",
        ),
        (lambda m, r: quire.quantize_model(m, "mxfp8", [torch.ones(2, 64)]), ValueError, "reads no batches"),
        (lambda m, r: quire.quantize_model(m, FP8), ValueError, "x has a static scale under fp8_tensor.*pass inputs"),
        (lambda m, r: quire.quantize_model(m, FP8, []), ValueError, "batch"),
        (
            lambda m, r: quire.quantize_model(m, FP8, [torch.ones(2, 64)], missing_input_scale=1),
            TypeError,
            "missing_input_scale must be",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, error, text, model, batches):
    report = quire.calibrate(model, batches, FP8)
    before, kind = copy.deepcopy(model.state_dict()), type(model.q)
    with pytest.raises(error, match=text):
        change(model, report)
    if "convert" not in change.__code__.co_names:
        assert type(model.q) is kind
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_scale_that_nobody_gave_is_not_written(model, tmp_path):
    convert(model, FP8)
    with pytest.raises(io.CheckpointError, match="must be finite and positive, got .nan.") as caught:
        io.save(model, tmp_path, dialect="modelopt")
    assert "quire.calibrate" in caught.value.remedy and not list(tmp_path.iterdir())


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(64, 128)


def test_a_joined_layer_keeps_the_files_scales_until_it_is_calibrated_again(model, batches, tmp_path):
    pair = nn.ModuleDict({"q": model.q, "k": model.k})
    convert(pair, FP8)
    pair["q"].input_scale.fill_(0.25)
    pair["k"].input_scale.fill_(0.5)
    io.save(pair, tmp_path / "a", dialect="modelopt")
    fused = Fused()
    io.load(fused, tmp_path / "a", fuse={"qk": ["q", "k"]})
    io.save(fused, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(tmp_path / "a")
    fused.qk.input_scale.fill_(0.75)
    io.save(fused, tmp_path / "c")
    changed = {name for name, value in raw(tmp_path / "c").items() if value != raw(tmp_path / "a")[name]}
    assert changed == {"q.input_scale", "k.input_scale"}
    assert Counter(raw(tmp_path / "c")[name][2] for name in changed) == {F32(0.75).tobytes(): 2}
