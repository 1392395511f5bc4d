"""Checkpoints that other tools wrote: read to the values that the tools give, and written again byte for byte."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import quire
from python.io.stored_golden import CASES, FOLDER, expected, summary
from quire.io import CheckpointError, StoredWeight

WRITTEN = [case for case in CASES if (FOLDER / case / "model.safetensors").is_file()]
#: What only a layer that is quantized has.
SCALES = ("scale", "scale_2", "scale_inv", "scales", "global_scale")


@pytest.fixture(autouse=True)
def needs_gguf(request):
    if "gguf" in request.node.name:
        pytest.importorskip("gguf")


def source(case):
    return FOLDER / case if case in WRITTEN else FOLDER / case / "model.gguf"


def as_the_tool_has_it(case, name, values):
    """gpt-oss: transformers gives [E, K, N], with rows of gate and up in turn."""
    if "gpt_oss" not in case:
        return values
    if name.endswith("gate_up_proj"):
        half = values.shape[1] // 2
        order = [row // 2 + half * (row % 2) for row in range(2 * half)]
        values = values[:, order]
    return values.transpose(1, 2)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_that_the_tool_gives(case):
    checkpoint, wanted = quire.io.read(source(case)), expected(case)
    assert wanted and checkpoint.groups.keys() == wanted.keys()
    for name, values in wanted.items():
        stored = checkpoint[name]
        assert isinstance(stored, StoredWeight)
        found = stored.dequantize(getattr(torch, values["dtype"]))
        assert summary(as_the_tool_has_it(case, name, found), values["signed_zeros"]) == values, name


@pytest.mark.parametrize("case", CASES)
def test_outlines_have_the_shapes_and_specs_of_what_is_read(case):
    checkpoint = quire.io.read(source(case))
    for name in checkpoint.groups:
        outline, stored = checkpoint.outline(name), checkpoint[name]
        assert outline.weight.is_meta and outline.shape == stored.shape
        assert outline.weight.spec == stored.weight.spec
        assert outline.weight.buffers().keys() == stored.weight.buffers().keys()
        assert (outline.input_scale is None) == (stored.input_scale is None)


def write_again(folder, checkpoint):
    quire.io.write(folder, checkpoint, dialect=checkpoint.dialect, overwrite=True)


def content(folder):
    """Every tensor's bytes, the texts of the header, and the configurations."""
    with safe_open(folder / "model.safetensors", "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        texts = opened.metadata()
    # 0-d tensors have no view as bytes
    found = {name: (t.dtype, tuple(t.shape), t.reshape(-1).view(torch.uint8).tolist()) for name, t in tensors.items()}
    files = ("config.json", "hf_quant_config.json")
    return found, texts, {file: json.loads((folder / file).read_text()) for file in files if (folder / file).exists()}


@pytest.mark.parametrize("case", WRITTEN)
def test_a_checkpoint_is_written_as_it_was(case, tmp_path):
    write_again(tmp_path, quire.io.read(FOLDER / case))
    assert content(tmp_path) == content(FOLDER / case)


@pytest.mark.parametrize("case", WRITTEN)
def test_a_missing_scale_is_named(case, tmp_path):
    tensors = load_file(FOLDER / case / "model.safetensors")
    with safe_open(FOLDER / case / "model.safetensors", "pt") as opened:
        texts = opened.metadata()
    for file in (FOLDER / case).glob("*.json"):
        shutil.copy(file, tmp_path)
    scales = [name for name in tensors if name.replace(".", "_").endswith(tuple("_" + end for end in SCALES))]
    assert len(scales) >= len(expected(case))
    for name in scales:
        save_file(
            {one: tensor for one, tensor in tensors.items() if one != name}, tmp_path / "model.safetensors", texts
        )
        with pytest.raises(CheckpointError) as error:
            quire.io.read(tmp_path)
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("case", "to"),
    [
        ("hf_deepseek", "compressed-tensors"),
        ("hf_deepseek", "quire"),
        ("hf_deepseek_v4", "compressed-tensors"),
        ("hf_mxfp8", "modelopt"),
        ("hf_fp8_per_tensor", "modelopt"),
        ("hf_gpt_oss", "deepseek"),
        ("hf_gpt_oss", "quire"),
        ("ct_fp8_block", "deepseek"),
        ("ct_fp8_channel", "fbgemm_fp8"),
        ("ct_mxfp8", "deepseek"),
        ("modelopt_fp8", "deepseek"),
        ("modelopt_mxfp8", "torchao"),
        ("modelopt_nvfp4", "torchao"),
        ("ct_fp8_channel", "torchao"),
        ("torchao_fp8", "compressed-tensors"),
        ("torchao_nvfp4", "quire"),
        ("gguf_fp4", "quire"),
    ],
)
def test_another_dialect_has_the_same_values(case, to, tmp_path):
    """Global scales can differ in how they are applied; these have none, or keep it."""
    quire.io.convert(source(case), tmp_path / "converted", to=to)
    before, after = quire.io.read(source(case)), quire.io.read(tmp_path / "converted")
    assert after.dialect == to and before.groups.keys() == after.groups.keys()
    for name in before.groups:
        one, other = (checkpoint[name].dequantize(torch.float32) for checkpoint in (before, after))
        assert summary(one) == summary(other), name
    assert quire.io.inspect(source(case)).dialect == before.dialect
    assert not quire.io.inspect(tmp_path / "converted").problems


def test_gpt_oss_written_from_another_dialect_alternates_rows_again(tmp_path):
    case = FOLDER / "hf_gpt_oss"
    quire.io.convert(case, tmp_path / "stacks", to="deepseek")
    quire.io.convert(tmp_path / "stacks", tmp_path / "again", to="gpt_oss")
    one, other = (load_file(folder / "model.safetensors") for folder in (case, tmp_path / "again"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# --------------------------------------------------------------------------------- bytes of E8M0


def fp8_file(folder: Path, scale: torch.Tensor, size: list[int], spec_of: str = "fp8") -> Path:
    weight = torch.full((256, 128), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1.0
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, folder / "model.safetensors", {"format": "pt"})
    said = {"quant_method": spec_of, "weight_block_size": size, "scale_fmt": "ue8m0"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    return folder


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("size", [[128, 128], [1, 32]], ids=["tiles", "blocks"])
def test_a_byte_of_a_scale_is_an_exponent(size, dtype, tmp_path):
    """0 is 2^-127, 127 is 1, 255 is NaN; whether the file calls it a number or not."""
    shape = (2, 1) if size == [128, 128] else (256, 4)
    for byte, value in ((0, 2.0**-127), (127, 1.0), (128, 2.0), (254, 2.0**127), (255, math.nan)):
        scale = torch.full(shape, byte, dtype=torch.uint8).view(dtype)
        path = fp8_file(tmp_path, scale, size)
        values = quire.io.read(path)["a.weight"].dequantize(torch.float32)
        wanted = torch.full((256, 128), value)
        assert torch.equal(values, wanted) or (byte == 255 and bool(values.isnan().all()))
        write_again(tmp_path / "again", quire.io.read(path))
        assert content(tmp_path / "again") == content(path)


def test_a_scale_without_a_weight_is_refused(tmp_path):
    """Under the names of DeepSeek-V4, where other tensors can end in .scale too."""
    tensors = load_file(FOLDER / "hf_deepseek_v4/model.safetensors") | {"layers.0.hc.scale": torch.ones(3)}
    name = "layers.0.ffn.experts.0.w1"
    shutil.copy(FOLDER / "hf_deepseek_v4/config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "layers.0.hc.scale" in quire.io.read(tmp_path).plain
    del tensors[f"{name}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}.scale: the scale belongs to no quantized weight"):
        quire.io.read(tmp_path)


def test_a_configuration_that_contradicts_the_scales_is_refused(tmp_path):
    scale = torch.ones(2, 1)
    with pytest.raises(CheckpointError, match=r"a.weight_scale_inv: config.json says weight_block_size \[1, 32\]"):
        quire.io.read(fp8_file(tmp_path, scale, [1, 32]))
    with pytest.raises(CheckpointError, match=r"weight_block_size must be \[128, 128\] or \[1, 32\], got \[64, 64\]"):
        quire.io.read(fp8_file(tmp_path, scale, [64, 64]))


@pytest.mark.parametrize("rows", [192, 576])
def test_tiles_at_the_edge_of_a_matrix_are_smaller(rows, tmp_path):
    scale = torch.arange(1, 2 * -(-rows // 128) + 1).float().reshape(-1, 2)
    weight = torch.full((rows, 200), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    values = quire.io.read(tmp_path)["a.weight"].dequantize(torch.float32)
    wanted = torch.empty(rows, 200)
    for row in range(rows):
        wanted[row, :128], wanted[row, 128:] = scale[row // 128, 0], scale[row // 128, 1]
    assert torch.equal(values, wanted)


# --------------------------------------------------------------------------------- fbgemm_fp8


def fbgemm_file(folder):
    said = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    tensors = {
        "a.q_proj.weight": codes.reshape(8, 32).clone(),
        "a.q_proj.weight_scale": torch.rand(8, 1),
        "experts.gate_up_proj": codes.reshape(2, 8, 16),  # [E, K, N]
        "experts.gate_up_proj_scale": torch.rand(2, 1, 16),
        "lm_head.weight": torch.randn(4, 8).bfloat16(),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def test_fp8_of_fbgemm_is_read_by_rows_and_keeps_its_limit(tmp_path):
    tensors = fbgemm_file(tmp_path)
    checkpoint = quire.io.read(tmp_path)
    assert checkpoint.dialect == "fbgemm_fp8"
    values = checkpoint["a.q_proj.weight"].dequantize(torch.float32)
    wanted = tensors["a.q_proj.weight"].float() * tensors["a.q_proj.weight_scale"]
    assert torch.equal(values.nan_to_num(7.0), wanted.nan_to_num(7.0))
    experts = checkpoint["experts.gate_up_proj"]
    wanted = tensors["experts.gate_up_proj"].float() * tensors["experts.gate_up_proj_scale"]
    assert experts.shape == (2, 16, 8)
    values = experts.dequantize(torch.float32).transpose(1, 2)
    assert torch.equal(values.nan_to_num(7.0), wanted.nan_to_num(7.0))
    write_again(tmp_path / "again", checkpoint)
    assert content(tmp_path / "again") == content(tmp_path)
    assert content(tmp_path / "again")[2]["config.json"]["quantization_config"]["activation_scale_ub"] == 1200.0


# --------------------------------------------------------------------------------- gpt-oss


@pytest.mark.parametrize("end", ["blocks", "scales", "bias"])
def test_a_wrong_shape_of_gpt_oss_is_named(end, tmp_path):
    case = FOLDER / "hf_gpt_oss"
    tensors = load_file(case / "model.safetensors")
    name = f"model.layers.1.mlp.experts.gate_up_proj_{end}"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(case / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"gate_up_proj_(blocks|scales|bias): expected .*got "):
        quire.io.read(tmp_path)


def test_biases_of_gate_and_up_move_with_their_rows():
    checkpoint = quire.io.read(FOLDER / "hf_gpt_oss")
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    raw = load_file(FOLDER / "hf_gpt_oss/model.safetensors")[f"{stem}_bias"]
    bias = checkpoint[stem].bias
    half = raw.shape[1] // 2
    for row in range(half):
        assert torch.equal(bias[:, row], raw[:, 2 * row]) and torch.equal(bias[:, half + row], raw[:, 2 * row + 1])


def test_layers_of_torchao_are_described_as_torchao_does(tmp_path):
    """Whatever they are written from: here from entries without the header of the file."""

    def described(folder):
        with safe_open(folder / "model.safetensors", "pt") as opened:
            texts = opened.metadata()
        said = {name: json.loads(texts[name]) for name in json.loads(texts["tensor_names"])}
        for one in said.values():
            for key in ("dtype", "orig_dtype"):  # which files of a few tensors do not say
                one.get("_data", {}).pop(key, None)
        return said

    for case in ("torchao_fp8", "torchao_mx", "torchao_nvfp4"):
        checkpoint = quire.io.read(FOLDER / case)
        quire.io.write(tmp_path / case, {name: checkpoint[name] for name in checkpoint}, dialect="torchao")
        assert described(tmp_path / case) == described(FOLDER / case)
        assert content(tmp_path / case)[0] == content(FOLDER / case)[0]
