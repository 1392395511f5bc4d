"""quire.calibrate: the static scales of a model's inputs, against amaxes taken by hand."""

import copy

import pytest
import torch
from torch import nn

import quire

pytestmark = pytest.mark.any_device


class Gated(nn.Module):
    """gate and up have the same input; extra is called in batches of more than 4 rows only."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.extra, self.never = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        h = torch.tanh(x) * factor
        y = self.down(torch.relu(self.gate(h)) * self.up(h))
        return self.extra(y) if len(x) > 4 else y


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Gated()


def inputs_of(model: Gated, x: torch.Tensor, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """What each layer is fed, by the layers' own products: the bits are those of the model."""
    h = torch.tanh(x) * factor
    down = torch.relu(model.gate(h)) * model.up(h)
    return {"gate": h, "up": h, "down": down, "extra": model.down(down)}


@pytest.mark.parametrize(
    ("recipe", "divisor"),
    [
        ("nvfp4", 2688),
        ("x=nvfp4:4over6=mae:256,w=nvfp4,dy=nvfp4", 1536),
        ("fp8_current", 448),
        ("x=fp8_tensor:e5m2,w=fp8_tensor,dy=fp8_tensor", 57344),
    ],
)
def test_a_scale_is_the_largest_amax_of_all_batches_over_the_largest_code(model, recipe, divisor):
    a, b = torch.randn(3, 32), 5 * torch.randn(8, 32)
    report = quire.calibrate(model, [a, {"x": a, "factor": 3.0}, (b,)], recipe)
    calls = [inputs_of(model, a), inputs_of(model, a, 3.0), inputs_of(model, b)]
    seen = {"gate": calls, "up": calls, "down": calls, "extra": calls[2:]}
    rows = {"gate": 14, "up": 14, "down": 14, "extra": 8}
    assert report.uncalibrated == ("never",)
    for layer in report.layers:
        amax = max(call[layer.name].abs().max() for call in seen[layer.name])
        assert layer.amax == amax.item() and layer.rows == rows[layer.name]
        assert layer.input_scale == (amax / divisor).item()
    assert list(report.input_scales) == ["gate", "up", "down", "extra"]
    assert "without a scale, since they saw no rows: never" in str(report)


class Late(Gated):
    """up sees one input more than gate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(10 * x).sum()


def test_layers_with_the_same_input_share_a_scale_unless_told_not_to(model):
    model.__class__, x = Late, torch.randn(3, 32)
    shared = quire.calibrate(model, [x], "nvfp4").input_scales
    own = quire.calibrate(model, [x], "nvfp4", shared=False).input_scales
    assert shared["gate"] == shared["up"] == own["up"] > own["gate"]
    assert own["up"] == ((10 * x.abs().max()) / 2688).item()


def test_each_group_has_its_own_scale_and_those_without_rows_are_listed():
    class Groups(nn.Module):
        def __init__(self):
            super().__init__()
            self.grouped = quire.GroupedLinear(3, 16, 16)

        def forward(self, x):
            return self.grouped(x, torch.tensor([2, 0, 3]))

    x = torch.randn(6, 16)  # the last row is in no group
    x[5] = 100
    report = quire.calibrate(Groups(), [x], "nvfp4")
    scales = {"grouped[0]": x[:2].abs().max() / 2688, "grouped[2]": x[2:5].abs().max() / 2688}
    assert report.input_scales == {name: scale.item() for name, scale in scales.items()}
    assert report.uncalibrated == ("grouped[1]",)


def test_the_model_does_not_change(model):
    model.up.eval()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(3, 32)
    quire.calibrate(model, [x], "nvfp4")
    assert model.training and model.gate.training and not model.up.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([torch.ones(2, 32)], "mxfp8"), ValueError, "x under mxfp8:?n?a?n? has scales of its rows or blocks alone"),
        (([torch.ones(2, 32)], "x=nvfp4:row_scaled,w=nvfp4,dy=nvfp4"), ValueError, "has scales of its rows or blocks"),
        (([torch.ones(2, 32)], None), ValueError, "recipe must say the format of x"),
        (([], "nvfp4"), ValueError, "batches is empty"),
        ((torch.ones(2, 32), "nvfp4"), TypeError, "for one batch pass"),
        (([torch.full((2, 32), float("nan"))], "nvfp4"), ValueError, "the input of 'gate' is not finite"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(model, arguments, error, text):
    with pytest.raises(error, match="calibrate: .*" + text):
        quire.calibrate(model, *arguments)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_on_the_meta_device_is_refused(model):
    with pytest.raises(ValueError, match="calibrate: gate.weight is on the meta device and has no values; load the w"):
        quire.calibrate(model.to("meta"), [torch.ones(2, 32)], "nvfp4")
    mixed = nn.Sequential(nn.Linear(32, 32, device="meta"), nn.Linear(32, 32))
    with pytest.raises(ValueError, match="quantize_model: 0.weight is on the meta device and has no values; load the"):
        quire.quantize_model(mixed, "mxfp8", [torch.ones(2, 32)], "gptq", filter=lambda module, name: name == "1")


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="ReLU has no linear layers"):
        quire.calibrate(nn.ReLU(), [torch.ones(2)], "nvfp4")


def test_recipes_whose_scale_the_layer_has_are_measured_and_unquantized_inputs_refused():
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 16)), torch.randn(8, 32)
    report = quire.calibrate(model, [x], "x=nvfp4:global=mul:given,w=nvfp4,dy=mxfp8")
    assert report.layers[0].input_scale == float(x.abs().max().cpu() / 2688)
    with pytest.raises(ValueError, match="calibrate: x is not quantized under the recipe"):
        quire.calibrate(model, [x], "x=none,w=nvfp4,dy=none")
