"""Checkpoints of ComfyUI and of AutoFP8: what their texts say, models, and what is not read."""

import json

import pytest
import torch

import quire
from python.io.checkpoint_files import E4M3, U8, Files, bytes_of, e4m3, every_byte, plain_scales, raw
from python.io.checkpoint_kinds import KINDS
from quire import io

pytestmark = pytest.mark.any_device

COMFYUI = [kind for kind in KINDS if kind.startswith("comfyui")]
STEMS = ("blocks.0.attn.qkv", "blocks.1.mlp")


def text(**said: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=U8)


def fp8_layer(stem: str = "a", **said: object) -> dict[str, torch.Tensor]:
    codes = (every_byte(48, 64) % 0x70).view(E4M3)
    return {f"{stem}.weight": codes, f"{stem}.weight_scale": torch.tensor(0.5), f"{stem}.comfy_quant": text(**said)}


def refused(tmp_path, tensors: dict[str, torch.Tensor], **texts: str) -> io.CheckpointError:
    with pytest.raises(io.CheckpointError) as caught:
        io.read(Files(tensors, texts=texts).write(tmp_path))
    return caught.value


@pytest.mark.parametrize(
    "said",
    [
        {"format": "nvfp4", "convrot": True, "convrot_groupsize": 256},
        {"format": "float8_e4m3fn", "params": {"convrot": True}},
        {"format": None},
        {"format": 3},
        {},
    ],
    ids=str,
)
def test_a_text_that_says_more_than_quire_knows_is_refused(said, tmp_path):
    error = refused(tmp_path / "a", fp8_layer(**said))
    assert error.tensor == "a" and str(said) in error.rule
    layers = {"layers": {"a": said}}
    tensors = fp8_layer()
    del tensors["a.comfy_quant"]
    error = refused(tmp_path / "b", tensors, _quantization_metadata=json.dumps(layers))
    assert error.tensor == "a" and str(said) in error.rule


@pytest.mark.parametrize("kind", ["int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16", "float8"])
def test_other_formats_are_refused_by_name(kind, tmp_path):
    error = refused(tmp_path, fp8_layer(format=kind))
    assert kind in error.rule and "nvfp4" in error.rule and error.tensor == "a"


@pytest.mark.parametrize("content", ["{", "[1]", '{"layers": [1]}', '{"layers": {"a": 1}}', '"x"'])
def test_damaged_texts_are_refused(content, tmp_path):
    tensors = fp8_layer()
    del tensors["a.comfy_quant"]
    assert refused(tmp_path / "header", tensors, _quantization_metadata=content).remedy
    tensors["a.comfy_quant"] = torch.tensor(list(content.encode()), dtype=U8)
    assert refused(tmp_path / "tensor", tensors).tensor in ("a", "a.comfy_quant")


def test_a_format_that_the_tensors_contradict_is_refused(tmp_path):
    for number, kind in enumerate(("float8_e5m2", "nvfp4", "mxfp8")):
        error = refused(tmp_path / str(number), fp8_layer(format=kind))
        assert error.tensor.startswith("a.")


def test_scales_that_change_inputs_are_refused(tmp_path):
    tensors = KINDS["comfyui nvfp4"]().tensors
    stem = f"model.diffusion_model.{STEMS[0]}"
    error = refused(tmp_path, tensors | {f"{stem}.pre_quant_scale": torch.ones(320)})
    assert "AWQ" in error.rule and error.tensor == f"{stem}.pre_quant_scale"


class Diffusion(torch.nn.Module):
    """Layers under the names of COMFYUI, and the tensors that are not quantized."""

    def __init__(self, files: Files) -> None:
        super().__init__()
        for name, value in files.tensors.items():
            path, _, last = name.rpartition(".")
            layer = f"{path}.weight" in files.values
            if not name.endswith("k_scale") and not name.endswith("v_scale") and "scaled_fp8" not in name and not layer:
                owner = self._module(path)
                kept = value if value.dtype.is_floating_point else None
                if kept is not None:
                    owner.register_parameter(last, torch.nn.Parameter(torch.zeros_like(kept)))
                else:
                    owner.register_buffer(last, torch.zeros_like(value))
        for name, value in files.values.items():
            path, _, last = name.removesuffix(".weight").rpartition(".")
            setattr(self._module(path), last, torch.nn.Linear(*value.shape[::-1]))

    def _module(self, path: str) -> torch.nn.Module:
        found = self
        for part in path.split("."):
            if not hasattr(found, part):
                setattr(found, part, torch.nn.Module())
            found = getattr(found, part)
        return found


@pytest.mark.parametrize("kind", COMFYUI)
def test_a_model_computes_with_the_values_and_is_saved_as_it_was(kind, tmp_path):
    files = KINDS[kind]()
    source = files.write(tmp_path / "a")
    model = Diffusion(files)
    report = io.load(model, source)
    assert report.dialect == "comfyui" and report.quantized.keys() == files.values.keys()
    for name, value in files.values.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, quire.Linear)
        assert torch.equal(
            layer.weight.dequantize(torch.float32).nan_to_num(7.0), torch.from_numpy(value).nan_to_num(7.0)
        )
        static = layer.recipe.static_input
        named = name.removesuffix("weight") + ("scale_input" if "scaled_fp8" in kind else "input_scale")
        assert static == (named in files.tensors and "unused" not in kind)
        assert not static or float(layer.input_scale) == float(files.tensors[named])
        assert (layer.recipe.input_spec == "none") == ("unused" in kind)
    io.save(model, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(source)
    again = io.read(tmp_path / "b")
    assert {n: g.layout.name for n, g in again.groups.items()} == {
        n: g.layout.name for n, g in io.read(source).groups.items()
    }


@pytest.mark.parametrize("kind", COMFYUI)
def test_a_changed_layer_is_saved_as_the_others(kind, tmp_path):
    files = KINDS[kind]()
    model = Diffusion(files)
    io.load(model, files.write(tmp_path / "a"))
    name = next(iter(files.values))
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight.copy_(torch.ones_like(weight.dequantize()))
    io.save(model, tmp_path / "b")
    found = io.read(tmp_path / "b")
    assert {group.layout.name for group in found.groups.values()} == {
        group.layout.name for group in io.read(tmp_path / "a").groups.values()
    }
    assert torch.equal(found[name].dequantize(), model.get_parameter(name).dequantize())
    other = Diffusion(files)
    io.load(other, tmp_path / "b")
    assert torch.equal(other.get_parameter(name).dequantize(), model.get_parameter(name).dequantize())


@pytest.mark.parametrize("kind", [kind for kind in COMFYUI if "nvfp4" in kind or "e4m3fn" in kind or "scaled" in kind])
def test_what_marks_a_file_of_comfyui_is_not_in_files_of_others(kind, tmp_path):
    files = KINDS[kind]()
    io.convert(files.write(tmp_path / "a"), tmp_path / "b", to="modelopt", exact=False)
    names = [*raw(tmp_path / "b"), *io.read(tmp_path / "b").metadata]
    assert not [name for name in names if "comfy" in name or "scaled_fp8" in name or "_quantization_metadata" in name]
    assert io.read(tmp_path / "b").dialect == "modelopt"


def test_codes_of_old_files_need_their_scale(tmp_path):
    """ComfyUI takes a scale that is missing to be 1."""
    for number, mark in enumerate(("scaled_fp8", "model.diffusion_model.scaled_fp8")):
        error = refused(
            tmp_path / str(number), {mark: torch.zeros(0).to(E4M3), "a.weight": every_byte(16, 16).view(E4M3)}
        )
        assert error.tensor == "a.scale_weight" and "missing" in error.rule


# --- AutoFP8


def autofp8(tensors: dict[str, torch.Tensor], **said: object) -> Files:
    return Files(tensors, {"config.json": {"quantization_config": {"quant_method": "fp8", **said}}})


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_a_missing_scale_is_named_as_the_file_has_it(scheme, tmp_path):
    codes = every_byte(16, 16).view(E4M3)
    files = autofp8({"a.weight": codes}, activation_scheme=scheme)
    with pytest.raises(io.CheckpointError) as caught:
        io.read(files.write(tmp_path / "a"))
    assert caught.value.tensor == "a.weight_scale"
    files.tensors["a.weight_scale"] = torch.tensor(0.5)
    if scheme == "static":
        with pytest.raises(io.CheckpointError) as caught:
            io.read(files.write(tmp_path / "b"))
        assert caught.value.tensor == "a.input_scale"
    else:
        assert io.read(files.write(tmp_path / "b")).groups["a.weight"].layout.dynamic == "fp8_tensor"


def test_names_of_deepseek_stay_with_deepseek(tmp_path):
    codes, scale = every_byte(16, 16).view(E4M3), torch.tensor(0.5)
    for number, (name, said) in enumerate(
        (("weight_scale_inv", {}), ("weight_scale_inv", {"weight_block_size": None, "activation_scheme": "dynamic"}))
    ):
        files = autofp8({"a.weight": codes, f"a.{name}": scale}, **said)
        assert io.read(files.write(tmp_path / str(number))).dialect == "deepseek"
    files = autofp8({"a.weight": codes, "a.weight_scale": scale}, weight_block_size=None, activation_scheme="dynamic")
    checkpoint = io.read(files.write(tmp_path / "vllm"))
    values = torch.from_numpy(e4m3(bytes_of(codes))) * 0.5
    assert checkpoint.dialect == "autofp8"
    assert torch.equal(checkpoint["a.weight"].dequantize(torch.float32).nan_to_num(7.0), values.nan_to_num(7.0))


def test_one_file_of_autofp8_has_one_scheme(tmp_path):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64) for name in "ab"}).requires_grad_(False)
    inputs = torch.randn(4, 64)
    forward = torch.nn.Sequential(*model.values())
    quire.quantize_model(model["a"], "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8", [inputs])
    quire.quantize_model(model["b"], "fp8_current")
    assert forward(inputs).isfinite().all()
    with pytest.raises(io.CheckpointError, match="one activation_scheme"):
        io.save(model, tmp_path, dialect="autofp8")


def test_an_index_may_have_the_name_of_its_files(tmp_path):
    """As diffusers names it."""
    tensors = fp8_layer(format="float8_e4m3fn") | {"norm.weight": plain_scales(4).float()}
    source = Files(tensors).write(tmp_path / "a", 3)
    index = source / "model.safetensors.index.json"
    index.rename(source / "diffusion_pytorch_model.safetensors.index.json")
    assert list(io.read(source)) == ["a.weight", "norm.weight"]
    (source / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(io.CheckpointError, match="no index"):
        io.read(source)
