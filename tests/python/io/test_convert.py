"""Converting between dialects is exact, or refused; what is lost is said in ulps."""

import json

import numpy as np
import pytest
import torch

import quire
from python.io.checkpoint_files import Files, compressed_config, compressed_nvfp4, modelopt_config, modelopt_nvfp4, raw
from python.io.checkpoint_kinds import KINDS
from quire import io

ONE = np.float32(1)
#: Of which the reciprocal of the reciprocal is another number.
NOT_INVERTIBLE = [x for x in np.linspace(0.001, 0.002, 50, dtype=np.float32) if ONE / (ONE / x) != x][0]
STEPS = np.arange(1, 16, dtype=np.float32)
INVERTIBLE = next(
    x
    for x in np.linspace(0.001, 0.002, 50, dtype=np.float32)
    if ONE / (ONE / x) == x and np.any(STEPS / (ONE / x) != STEPS * x)
)
#: Two numbers that 2688 maps to one, so that an amax cannot tell them apart.
COLLIDING = next(
    (x, np.nextafter(x, ONE))
    for x in np.linspace(0.001, 0.002, 1000, dtype=np.float32)
    if x * np.float32(2688) == np.nextafter(x, ONE) * np.float32(2688)
)
FOUR = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
LOCAL = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


def modelopt(path, scale: float, input_scale: float = 0.5):
    tensors, _ = modelopt_nvfp4("m.a", 32, 64, scale2=float(scale))
    tensors["m.a.input_scale"] = torch.tensor(float(input_scale))
    return Files(tensors | {"m.k_proj.k_scale": torch.tensor(2.0)}, modelopt_config("NVFP4")).write(path)


def test_the_numbers_are_what_they_are_called():
    assert ONE / (ONE / INVERTIBLE) == INVERTIBLE and ONE / (ONE / NOT_INVERTIBLE) != NOT_INVERTIBLE
    assert COLLIDING[0] != COLLIDING[1]


def test_globals_that_an_amax_would_confuse_stay_apart(tmp_path):
    for number, scale in enumerate(COLLIDING):
        source = modelopt(tmp_path / f"a{number}", scale)
        io.write(tmp_path / f"b{number}", io.read(source), dialect="modelopt")
        assert raw(tmp_path / f"b{number}")["m.a.weight_scale_2"][2] == scale.tobytes()


def test_modelopt_to_compressed_tensors_and_back_gives_the_bytes(tmp_path):
    assert ONE / (ONE / np.float32(0.5)) == np.float32(0.5)
    source = modelopt(tmp_path / "a", INVERTIBLE)
    report = io.convert(source, tmp_path / "b", to="compressed-tensors")
    assert report.losses == () and report.layers == 1
    tensors = raw(tmp_path / "b")
    assert tensors["m.a.weight_packed"][2] == raw(source)["m.a.weight"][2]
    assert tensors["m.a.weight_global_scale"] == ("F32", (1,), (ONE / INVERTIBLE).tobytes())
    assert tensors["m.a.input_global_scale"] == ("F32", (1,), np.float32(2).tobytes())
    assert tensors["m.k_proj.k_scale"] == raw(source)["m.k_proj.k_scale"]
    said = json.loads((tmp_path / "b/config.json").read_text())
    assert said["unknown"] == {"kept": [1, 2.5, None]}
    assert said["quantization_config"]["format"] == "nvfp4-pack-quantized"
    io.convert(tmp_path / "b", tmp_path / "c", to="modelopt")
    assert raw(tmp_path / "c") == raw(source)


@pytest.mark.parametrize(("scale", "input_scale"), [(NOT_INVERTIBLE, 0.5), (INVERTIBLE, NOT_INVERTIBLE)])
def test_what_does_not_come_back_is_refused_or_listed(scale, input_scale, tmp_path):
    source = modelopt(tmp_path / "a", scale, input_scale)
    with pytest.raises(io.CheckpointError, match="cannot store the layer exactly") as caught:
        io.convert(source, tmp_path / "b", to="compressed-tensors")
    assert caught.value.tensor == "m.a.weight" and not list((tmp_path / "b").glob("*"))
    report = io.convert(source, tmp_path / "b", to="compressed-tensors", exact=False)
    (loss,) = report.losses
    assert (loss.tensor, loss.ulp) == ("m.a.weight", 1) and "1 ulp" in str(report)


def test_values_of_two_dialects_differ_by_ulps_that_diff_counts(tmp_path):
    source = modelopt(tmp_path / "a", INVERTIBLE)
    io.convert(source, tmp_path / "b", to="compressed-tensors")
    (what,) = io.diff(source, tmp_path / "b").different.values()
    values = io.read(source)["m.a.weight"].dequantize(torch.float32).numpy()
    others = io.read(tmp_path / "b")["m.a.weight"].dequantize(torch.float32).numpy()
    known = ~np.isnan(values)
    count = int((values != others)[known].sum())
    assert count > 0 and what.endswith(f"{count} of {values.size} values differ, at most 1 ulp of float32")


SAME_VALUES = [
    ("modelopt MXFP8", "compressed-tensors"),
    ("compressed-tensors mxfp8", "modelopt"),
    ("modelopt FP8", "compressed-tensors"),
    ("compressed-tensors tensor static", "modelopt"),
    ("modelopt FP8_PER_CHANNEL_PER_TOKEN", "compressed-tensors"),
    ("compressed-tensors channel token", "modelopt"),
    ("modelopt fp8_pb_wo", "compressed-tensors"),
    ("compressed-tensors block", "modelopt"),
]


@pytest.mark.parametrize(("kind", "to"), SAME_VALUES)
def test_dialects_that_scale_alike_keep_every_value(kind, to, tmp_path):
    files = KINDS[kind]()
    source = files.write(tmp_path / "a")
    report = io.convert(source, tmp_path / "b", to=to)
    assert report.losses == () and io.inspect(tmp_path / "b").dialect == to
    found = io.diff(source, tmp_path / "b")
    assert not found and sorted(found.equal_values) == sorted(files.values)
    again = io.read(tmp_path / "b")
    for name, expected in files.values.items():
        assert np.array_equal(again[name].dequantize(torch.float32).numpy(), expected, equal_nan=True)


#: Dialects that are written. gpt-oss has stacks of experts only.
WRITTEN = (
    "modelopt",
    "compressed-tensors",
    "deepseek",
    "autofp8",
    "comfyui",
    "gpt_oss",
    "fbgemm_fp8",
    "torchao",
    "quire",
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_dialect_takes_a_kind_whole_or_refuses_it(kind, tmp_path):
    files = KINDS[kind]()
    source, taken = files.write(tmp_path / "source"), []
    for to in WRITTEN:
        try:
            report = io.convert(source, tmp_path / to, to=to, exact=False)
        except io.CheckpointError as error:
            assert error.remedy and not (tmp_path / to).exists()
            continue
        taken.append(to)
        found = io.read(tmp_path / to)
        assert found.dialect == to and not io.inspect(tmp_path / to).problems
        assert sorted(found.groups) == sorted(files.values) and report.layers == len(files.values)
        for name, expected in files.values.items():
            values = found[name].dequantize(torch.float32).numpy()
            # A global scale that was inverted is rounded once more. Decoding rounds twice here, and twice there.
            np.testing.assert_allclose(values, expected, rtol=5 * 2.0**-24, atol=0)
    assert "quire" in taken


def test_how_inputs_are_treated_otherwise_is_a_note(tmp_path):
    source = KINDS["compressed-tensors block"]().write(tmp_path / "a")
    (note,) = io.convert(source, tmp_path / "b", to="modelopt").notes
    assert note.startswith("the recipe changes: inputs are not quantized, before as fp8_block (")
    assert (
        io.convert(KINDS["modelopt MXFP8"]().write(tmp_path / "c"), tmp_path / "d", to="compressed-tensors").notes == ()
    )


def test_a_layer_with_the_same_bytes_and_other_inputs_is_stored_in_another_way(tmp_path):
    model = quire.quantize_model(torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False)), "fp8_block")
    io.save(model, tmp_path / "a", dialect="deepseek")
    (note,) = io.convert(tmp_path / "a", tmp_path / "b", to="compressed-tensors").notes
    assert note.startswith("the recipe changes: ")
    io.convert(tmp_path / "b", tmp_path / "c", to="deepseek")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ac"]
    found = io.diff(tmp_path / "a", tmp_path / "c")
    assert files[0] == files[1] and not found and found.equal_values == ("0.weight",)
    assert "0 entries are the same, 1 with the same values, stored in another way\nconfig.json differs" in str(found)


def test_a_kind_that_a_dialect_lacks_is_refused(tmp_path):
    source = KINDS["compressed-tensors mxfp4"]().write(tmp_path / "a")
    with pytest.raises(io.CheckpointError, match="modelopt has no layout for mxfp4") as caught:
        io.convert(source, tmp_path / "b", to="modelopt")
    assert "quire.io.convert(src, dst, to='modelopt', requantize='fp8_block:128x128')" in caught.value.remedy
    assert io.convert(source, tmp_path / "b", to="modelopt", requantize="fp8_block:128x128").layers > 0
    with pytest.raises(io.CheckpointError, match="no layout for a stack of nvfp4"):
        io.convert(
            KINDS["modelopt experts in one tensor"]().write(tmp_path / "c"), tmp_path / "d", to="compressed-tensors"
        )


def test_quantizing_again_is_only_done_when_asked(tmp_path):
    values = torch.randn(64, 64)
    tensors = {"m.a.weight": values, "m.b.weight": torch.randn(64, 64), "m.norm.weight": torch.ones(64)}
    source = Files(tensors, {"config.json": {"torch_dtype": "float32"}}).write(tmp_path / "a")
    report = io.convert(
        source, tmp_path / "b", to="modelopt", requantize="mxfp8", filter=lambda name: name == "m.a.weight"
    )
    assert report.layers == 1
    checkpoint = io.read(tmp_path / "b")
    assert checkpoint.groups["m.a.weight"].layout.name == "MXFP8"
    assert torch.equal(checkpoint["m.b.weight"], tensors["m.b.weight"])
    error = (checkpoint["m.a.weight"].dequantize() - values).abs()
    assert float((error / values.abs().amax(1, keepdim=True)).max()) < 2**-4  # half a step of E4M3
    assert "m.b" in json.loads((tmp_path / "b/hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    found = io.verify(tmp_path / "b", like=source)
    assert found and found.layers[0].sqnr > 25
    io.convert(tmp_path / "b", tmp_path / "c", to="modelopt", requantize="nvfp4")
    assert io.inspect(tmp_path / "c").layers[0].spec == "nvfp4:global=mul"
    with pytest.raises(io.CheckpointError, match="no layout for mxfp4"):
        io.convert(source, tmp_path / "d", to="modelopt", requantize="mxfp4")


@pytest.mark.parametrize(
    "name", ["emb", "model.embed_tokens", "wte", "tok_embeddings", "bert.embeddings.word_embeddings"]
)
def test_a_quantized_weight_with_the_name_of_an_embedding_is_noted(name, tmp_path):
    tensors = {f"{name}.weight": torch.randn(64, 64), "patch_embed.proj.weight": torch.randn(64, 64)}
    io.write(tmp_path / "a", tensors, dialect=None)
    options = {"to": "modelopt", "requantize": "mxfp8"}
    report = io.convert(tmp_path / "a", tmp_path / "b", filter=lambda name: True, **options)
    assert report.layers == 2 and len(report.notes) == 1
    assert report.notes[0].startswith(f"{name}.weight: the name says embedding. quire.io.load refuses")
    report = io.convert(tmp_path / "a", tmp_path / "c", filter=lambda name: "proj" in name, **options)
    assert report.layers == 1 and report.notes == ()  # as the note says
    report = io.convert(tmp_path / "b", tmp_path / "d", **options)  # which does not choose it
    assert report.notes == ()


def test_a_filter_chooses_entries(tmp_path):
    source = modelopt(tmp_path / "a", 0.5)
    io.convert(source, tmp_path / "b", to="modelopt", filter=lambda name: name.startswith("m.a"))
    assert raw(tmp_path / "b").keys() == {name for name in raw(source) if name.startswith("m.a")}


def test_compressed_tensors_divides(tmp_path):
    tensors, values = compressed_nvfp4("m.a", 32, 64, divisor=3.0)
    source = Files(tensors, compressed_config("nvfp4-pack-quantized", FOUR, LOCAL)).write(tmp_path / "a")
    found = io.read(source)["m.a.weight"].dequantize(torch.float32).numpy()
    assert np.array_equal(found, values, equal_nan=True)
    multiplied = values * np.float32(9)  # what a reader gives that takes the divisor for a factor
    assert not np.allclose(found, multiplied, equal_nan=True)
