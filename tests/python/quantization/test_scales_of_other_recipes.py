"""Static scales of inputs where a layer or a file gets another format of x: against amaxes, divided by hand."""

import io as files
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import quire
from pairwise import pairwise
from python.quantization.scales_of_amax import F32, SCALES
from quire import io

NVFP4_MUL, NVFP4_DIV = "nvfp4:global=mul", "nvfp4:global=div"


def recipe(x: str, w: str = "fp8_tensor") -> str:
    return f"x={x},w={w},dy=mxfp8"


def batch() -> torch.Tensor:
    return 3 * torch.randn(9, 64, generator=torch.Generator().manual_seed(1))


def amax() -> np.float32:
    return F32(batch().abs().max().item())


def model_of(text: str) -> nn.Sequential:
    torch.manual_seed(0)
    return quire.quantize_model(nn.Sequential(nn.Linear(64, 32)).requires_grad_(False), text, [batch()])


def assert_within_2_ulp(found: float, expected: np.float32) -> None:
    """numerics.md 5.12."""
    assert abs(np.float64(found) - np.float64(expected)) <= 2 * np.float64(np.spacing(expected)), (found, expected)


def assigned(model: nn.Sequential, text: str) -> nn.Sequential:
    model[0].recipe = text
    return model


def converted(model: nn.Sequential, text: str) -> nn.Sequential:
    return quire.convert(model, text, for_inference=True, tokens=None, min_features=1)


def loaded(model: nn.Sequential, text: str, **options: object) -> nn.Sequential:
    file = files.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = converted(nn.Sequential(nn.Linear(64, 32)).requires_grad_(False), text)
    other.load_state_dict(torch.load(file, weights_only=True), **options)
    return other


def refitted(model: nn.Sequential, text: str) -> nn.Sequential:
    other = converted(nn.Sequential(nn.Linear(64, 32)).requires_grad_(False), text)
    quire.refit(other, model.state_dict())
    return other


WAYS = {
    "assigned": assigned,
    "converted": converted,
    "loaded": loaded,
    "loaded by assignment": lambda model, text: loaded(model, text, assign=True),
    "refitted": refitted,
}


@pytest.mark.parametrize(("way", "before", "after"), pairwise([*WAYS], [*SCALES], [*SCALES]))
def test_a_layer_of_another_recipe_has_the_scale_of_the_same_amax(way, before, after):
    model = WAYS[way](model_of(recipe(before)), recipe(after))
    assert_within_2_ulp(model[0].input_scale.item(), SCALES[after](amax()))
    assert model[0].input_scale.dtype == torch.float32
    if before == after:
        assert model[0].input_scale.item() == SCALES[after](amax())


def test_what_is_no_scale_yet_stays_none_and_other_recipes_take_it_away():
    model = converted(nn.Sequential(nn.Linear(64, 32)), recipe("fp8_tensor:given"))
    model[0].recipe = recipe("nvfp4:given")
    assert model[0].input_scale.isnan().all()
    calibrated = model_of(recipe("fp8_tensor:given"))
    calibrated[0].recipe = None
    calibrated[0].recipe = recipe("nvfp4:given")  # the scale is still that of FP8 until here
    assert_within_2_ulp(calibrated[0].input_scale.item(), amax())
    assert "input_scale" not in converted(calibrated, recipe("fp8_tensor"))[0].state_dict()


def test_every_group_and_matmul_has_its_own():
    layers = nn.ModuleDict(
        {"mlp": quire.LayerNormMLP(64, 96), "grouped": quire.GroupedLinear(3, 64, 64)}
    ).requires_grad_(False)
    converted(layers, recipe("fp8_tensor:given"))
    amaxes = {"mlp.fc1_input_scale": [3.0], "mlp.fc2_input_scale": [0.7], "grouped.input_scale": [1.0, 5.0, 11.0]}
    for name, values in amaxes.items():
        layers.get_buffer(name).copy_(torch.tensor(values) / 448)
    converted(layers, recipe("nvfp4:global=div:given"))
    for name, values in amaxes.items():
        for found, value in zip(layers.get_buffer(name).tolist(), values, strict=True):
            assert_within_2_ulp(found, F32(2688) / F32(value))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_autocast_does_not_use_the_scale_of_another_format(compiled, compiler):
    model, x = model_of(recipe("fp8_tensor:given")), batch()
    run = compiler(model) if compiled else model
    with torch.no_grad():
        with (
            quire.autocast(recipe=recipe("nvfp4:given")),
            pytest.raises(Exception, match="is one for x=fp8_tensor:giv"),
        ):
            run(x)
        with quire.autocast(recipe=recipe("fp8_tensor:given:nan")):
            assert torch.equal(run(x), model(x))
        y = model(x)
        model[0].recipe = recipe("nvfp4:given")
        with quire.autocast(recipe=recipe("nvfp4:given")):
            assert not torch.equal(model(x), y)


# --- files


#: w, x, dialect -> the spec of x in the file, and the name of the scale there.
FILES = [
    *(
        ("fp8_tensor", x, dialect, "fp8_tensor:given", name)
        for x in ("nvfp4:global=mul:given", "nvfp4:global=div:given", "nvfp4:given", "fp8_tensor:e5m2:given")
        for dialect, name in (
            ("modelopt", "0.input_scale"),
            ("autofp8", "0.input_scale"),
            ("comfyui", "0.input_scale"),
            ("deepseek", "0.activation_scale"),
            ("compressed-tensors", "0.input_scale"),
        )
    ),
    ("fp8_tensor:e5m2", "fp8_tensor:given", "comfyui", "fp8_tensor:e5m2:given", "0.input_scale"),
    (NVFP4_MUL, "fp8_tensor:given", "comfyui", "nvfp4:global=mul:given", "0.input_scale"),
    (NVFP4_MUL, "fp8_tensor:given", "torchao", "nvfp4:global=mul:given", "0._weight_act_per_tensor_scale"),
    (NVFP4_MUL, "fp8_tensor:e5m2:given", "modelopt", "nvfp4:global=mul:given", "0.input_scale"),
    (NVFP4_DIV, "fp8_tensor:given", "compressed-tensors", "nvfp4:global=div:given", "0.input_global_scale"),
]


@pytest.mark.parametrize(("w", "x", "dialect", "of_file", "name"), FILES)
def test_a_file_with_inputs_in_another_format_has_the_scale_of_the_same_amax(w, x, dialect, of_file, name, tmp_path):
    model = model_of(recipe(x, w))
    report = io.save(model, tmp_path, dialect=dialect)
    check_file(tmp_path, name, of_file, report)
    # As precise as calibration under that recipe, or as a layer that got it.
    assert torch.equal(results(tmp_path), assigned(model, recipe(of_file, w))(batch()))


def check_file(folder: Path, name: str, of_file: str, report: io.SaveReport) -> None:
    found = load_file(folder / "model.safetensors")[name]
    assert found.dtype == torch.float32
    assert_within_2_ulp(found.item(), SCALES[of_file](amax()))
    (note,) = report.notes
    assert "the recipe changes" in note and "the static scale was measured for " in note
    assert "the file has the one of the same amax for " in note
    assert layer_of(folder).recipe.input_spec == of_file


def layer_of(folder: Path) -> quire.Linear:
    other = nn.Sequential(nn.Linear(64, 32))
    io.load(other, folder)
    return other[0]


def results(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return layer_of(folder)(batch())


@pytest.mark.parametrize(
    ("dialect", "of_file", "name"),
    [
        ("comfyui", "nvfp4:global=mul:given", "0.input_scale"),
        ("torchao", "nvfp4:global=mul:given", "0._weight_act_per_tensor_scale"),
        ("compressed-tensors", "nvfp4:global=div:given", "0.input_global_scale"),
    ],
)
@pytest.mark.parametrize("via", ["modelopt", "quire"])
def test_a_converted_file_has_the_scale_of_the_same_amax(via, dialect, of_file, name, tmp_path):
    io.save(model_of(recipe("fp8_tensor:given", NVFP4_MUL)), tmp_path / "a", dialect=via)
    report = io.convert(tmp_path / "a", tmp_path / "b", to=dialect, exact=False)
    check_file(tmp_path / "b", name, of_file, report)


RECALIBRATED = {
    # Recipe of the file -> another recipe of the layer after loading, and how the file stores the layer then.
    "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8": ("fp8_tensor:given", "W4A8_NVFP4_FP8"),
    "x=fp8_tensor:given,w=nvfp4:global=mul,dy=mxfp8": ("nvfp4:global=mul:given", "NVFP4"),
    "x=none,w=nvfp4:global=mul": ("nvfp4:global=mul:given", "NVFP4"),
}


@pytest.mark.parametrize("before", RECALIBRATED)
@pytest.mark.parametrize("changed", [False, True], ids=["weight as read", "weight changed"])
def test_a_loaded_model_that_is_calibrated_for_another_format_is_saved_in_that(before, changed, tmp_path):
    x, layout = RECALIBRATED[before]
    io.save(
        quire.quantize_model(nn.Sequential(nn.Linear(64, 32)), before, *[[batch()]] * ("given" in before)),
        tmp_path / "a",
        dialect="modelopt",
    )
    model = nn.Sequential(nn.Linear(64, 32))
    io.load(model, tmp_path / "a")
    converted(model, recipe(x, NVFP4_MUL))
    quire.calibrate(model, [batch()], "nvfp4").apply(model)
    if changed:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    assert not io.save(model, tmp_path / "b").notes
    assert layout in str(io.inspect(tmp_path / "b"))
    found = load_file(tmp_path / "b" / "model.safetensors")["0.input_scale"]
    assert found.item() == SCALES[x](amax()) and layer_of(tmp_path / "b").recipe.input_spec == x
    with torch.no_grad():
        assert torch.equal(results(tmp_path / "b"), model(batch()))


def test_a_scale_that_the_file_does_not_use_is_not_used_elsewhere(tmp_path):
    io.save(model_of(recipe("nvfp4:global=mul:given", NVFP4_MUL)), tmp_path / "a", dialect="torchao")
    unused(tmp_path / "a" / "model.safetensors")
    assert layer_of(tmp_path / "a").recipe.input_spec == "none"
    with pytest.raises(io.CheckpointError, match="the scale of the input, which the layer does not use, has no place"):
        io.convert(tmp_path / "a", tmp_path / "b", to="modelopt")
    report = io.convert(tmp_path / "a", tmp_path / "b", to="modelopt", exact=False)
    assert not report.notes and len(report.losses) == 1
    assert "0.input_scale" not in load_file(tmp_path / "b" / "model.safetensors")
    assert layer_of(tmp_path / "b").recipe.input_spec == "none"
    # quire keeps it, and gives it back.
    io.convert(tmp_path / "a", tmp_path / "c", to="quire")
    io.convert(tmp_path / "c", tmp_path / "d", to="torchao")
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in "ad")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert layer_of(tmp_path / "d").recipe.input_spec == "none"


def unused(file: Path) -> None:
    """Takes out of a file of torchao that inputs are quantized; the scale stays."""
    import json

    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    said = json.loads(about["0.weight"])
    said["_data"]["act_quant_kwargs"] = None
    save_file(load_file(file), file, about | {"0.weight": json.dumps(said)})


SMALL: list[tuple[Callable[[torch.Tensor], object], str]] = [
    (lambda scale: scale.fill_(1e-45), "finite and positive"),
    (lambda scale: scale.fill_(torch.nan), "finite and positive"),
]


@pytest.mark.parametrize(("change", "text"), SMALL)
def test_a_scale_without_one_of_the_same_amax_is_refused(change, text, tmp_path):
    model = model_of(recipe("fp8_tensor:e5m2:given", NVFP4_MUL))
    change(model[0].input_scale)
    model[0].recipe = recipe("fp8_tensor:given", NVFP4_MUL)
    change(model[0].input_scale)
    with pytest.raises(io.CheckpointError, match=text) as caught:
        io.save(model, tmp_path, dialect="comfyui")
    assert "quire.calibrate" in caught.value.remedy and not list(tmp_path.iterdir())
