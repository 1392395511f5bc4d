"""Codes without a scale, and scales that nobody reads, are refused: no scale is assumed, and none is left out."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from python.io.checkpoint_files import BF16, E4M3, U8, Files, bytes_of, e4m3, e5m2, e8m0, every_byte, raw
from python.io.checkpoint_kinds import KINDS
from quire import io
from quire.io.__main__ import main

pytestmark = pytest.mark.any_device

E5M2, E8M0, F4 = torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def fnuz(codes: np.ndarray, bits: int) -> np.ndarray:
    """A sign, an exponent and `bits` bits of fraction; 0x80 is NaN, and the bias is one more than of the other FP8."""
    bias, mask = 2 ** (6 - bits), 2**bits - 1
    exponent, fraction = (codes & 0x7F) >> bits, (codes & mask) / 2.0**bits
    value = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent.astype(float) - bias)
    )
    return np.where(codes == 0x80, np.nan, np.where(codes & 0x80, -value, value)).astype(np.float32)


#: Dtype of codes -> what its bytes mean by themselves, None if they are no numbers without more.
CODES = {
    E4M3: e4m3,
    E5M2: e5m2,
    FNUZ[0]: lambda codes: fnuz(codes, 3),
    FNUZ[1]: lambda codes: fnuz(codes, 2),
    E8M0: e8m0,
    F4: None,
    U8: None,
    torch.int8: None,
}


def codes(dtype: torch.dtype) -> torch.Tensor:
    return every_byte(32, 64).view(dtype)


def model(columns: int = 64, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.ModuleDict({"a": torch.nn.Linear(columns, 32, bias=False, dtype=dtype)})


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_codes_without_a_scale_are_refused(dtype, strict, tmp_path):
    source = Files({"a.weight": codes(dtype)}).write(tmp_path / "a")
    for call in (io.read, lambda path: io.load(model(), path, strict=strict)):
        with pytest.raises(io.CheckpointError, match="no scale for it") as caught:
            call(source)
        assert caught.value.tensor == "a.weight" and "scale=1" in caught.value.remedy
        assert caught.value.file.endswith("model.safetensors")
    with pytest.raises(io.CheckpointError, match="no scale for it"):
        io.convert(source, tmp_path / "b", to="quire")
    assert not (tmp_path / "b").exists()
    (problem,) = io.inspect(source).problems
    assert "a.weight" in problem and not io.verify(source)


def test_codes_of_other_names_are_refused_too(tmp_path):
    """Of a bias, of an embedding, of experts in one tensor, and of a parameter of the model itself."""
    tensors = {"a.weight": torch.zeros(32, 64)}
    for number, name in enumerate(("a.bias", "embed_tokens.weight", "experts.gate_up_proj", "weight", "x")):
        source = Files(tensors | {name: codes(E4M3)}).write(tmp_path / str(number))
        with pytest.raises(io.CheckpointError, match="no scale for it") as caught:
            io.load(model(), source, strict=False)
        assert caught.value.tensor == name


@pytest.mark.parametrize("dtype", [dtype for dtype, values in CODES.items() if values is not None], ids=str)
@pytest.mark.parametrize("of_model", [torch.float32, BF16], ids=str)
def test_with_scale_1_codes_are_values(dtype, of_model, tmp_path):
    tensor, layer = codes(dtype), model(dtype=of_model)
    source = Files({"a.weight": tensor}).write(tmp_path)
    report = io.load(layer, source, scale=1)
    true = torch.from_numpy(CODES[dtype](bytes_of(tensor))).to(of_model)
    assert torch.equal(layer["a"].weight.detach().nan_to_num(7.0), true.nan_to_num(7.0))
    assert report.quantized == {} and len(report.notes) == 1
    assert str(dtype) in report.notes[0] and "scale=1" in report.notes[0] and "a.weight" in report.notes[0]
    assert torch.equal(io.read(source, scale=1)["a.weight"].view(U8), tensor.view(U8))


@pytest.mark.cpu_only
def test_codes_of_joined_layers_are_values_too(tmp_path):
    tensors = {f"{name}_proj.weight": every_byte(16, 64, seed=number).view(E4M3) for number, name in enumerate("qkv")}
    source = Files(tensors).write(tmp_path)
    fused = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(64, 48, bias=False)})
    io.load(fused, source, scale=1, fuse=True)
    true = np.concatenate([e4m3(bytes_of(tensor)) for tensor in tensors.values()])
    assert np.array_equal(fused["qkv_proj"].weight.detach().numpy(), true, equal_nan=True)


@pytest.mark.parametrize("dtype", [F4, torch.int32, torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_parameter_gets_no_codes_and_no_counts(dtype, tmp_path):
    tensor = codes(F4) if dtype == F4 else torch.ones(32, 64, dtype=dtype)
    source, layer = Files({"a.weight": tensor}).write(tmp_path), model()
    before = layer["a"].weight.detach().clone()
    with pytest.raises(io.CheckpointError, match="codes, counts or complex numbers") as caught:
        io.load(layer, source, scale=1 if dtype == F4 else None)
    assert caught.value.tensor == "a.weight" and torch.equal(layer["a"].weight, before)


@pytest.mark.parametrize(
    ("option", "wrong", "error"),
    [
        *[("scale", wrong, ValueError) for wrong in (0.5, 0, True)],
        ("scale", "1", TypeError),
        ("missing_input_scale", "zero", ValueError),
        ("missing_input_scale", None, TypeError),
    ],
)
def test_other_ways_to_take_a_scale_that_is_missing_are_refused(option, wrong, error, tmp_path):
    source, given = Files({"a.weight": codes(E4M3)}).write(tmp_path), {option: wrong}
    for call in (
        lambda: io.read(source, **given),
        lambda: io.load(model(), source, **given),
        lambda: io.convert(source, tmp_path / "b", to="quire", **given),
    ):
        with pytest.raises(error, match=rf"^quire\.io\.\w+: {option} must be"):
            call()


def test_a_file_that_was_cast_to_fp8_can_be_quantized(tmp_path, capsys):
    small = every_byte(64, 64) % 0x60  # no NaN
    source = Files({"a.weight": small.view(E4M3), "b.weight": torch.ones(64)}).write(tmp_path / "a")
    arguments = ["convert", str(source), str(tmp_path / "b"), "--to", "modelopt"]
    assert main([*arguments, "--requantize", "mxfp8", "--filter", "a.*"]) == 1
    assert "scale=1" in capsys.readouterr().err
    assert main([*arguments, "--requantize", "mxfp8", "--filter", "a.*", "--scale", "1"]) == 0
    values = io.read(tmp_path / "b")["a.weight"].dequantize(torch.float32).numpy()
    # No value is above 30, so that the scale of a block is a power of two of at most 1/8, and codes lose nothing.
    assert np.array_equal(values, e4m3(small.numpy()))


#: Names of scales that no dialect has beside a weight of this name.
BESIDE = ["scale", "my_scale", "weight.scale", "weight_scale_3", "scaled", "output_scale", "weightScale", "SCALE"]


def with_scale(kind: str, name: str) -> tuple[Files, str]:
    files = KINDS[kind]()
    weight = next(iter(files.values))
    stem = weight.removesuffix(".weight")
    full = f"{weight}_{name.removeprefix('weight.')}" if stem == weight else f"{stem}.{name}"
    files.tensors[full] = torch.tensor(2.0)
    return files, full


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_beside_a_quantized_weight_is_never_left_out(kind, name, tmp_path):
    files, full = with_scale(kind, name)
    source = files.write(tmp_path / "a")
    for call in (
        io.read,
        lambda path: io.read(path, scale=1),
        lambda path: io.convert(path, tmp_path / "b", to="quire"),
    ):
        with pytest.raises(io.CheckpointError) as caught:
            call(source)
        assert caught.value.tensor == full
    with pytest.raises(io.CheckpointError):
        io.load(torch.nn.Module(), source, strict=False)
    assert full in " ".join(io.inspect(source).problems)


@pytest.mark.parametrize("name", [*BESIDE, "weight_scale", "input_scale", "weight_scale_inv"])
@pytest.mark.parametrize("scale", [None, 1])
def test_a_scale_beside_codes_is_never_left_out(name, scale, tmp_path):
    source = Files({"a.weight": codes(E5M2), f"a.{name}": torch.tensor(2.0)}).write(tmp_path)
    layer = model()
    before = layer["a"].weight.detach().clone()
    with pytest.raises(io.CheckpointError):
        io.load(layer, source, strict=False, scale=scale)
    assert torch.equal(layer["a"].weight, before)


def test_a_scale_of_another_module_is_a_plain_tensor(tmp_path):
    files = KINDS["modelopt NVFP4"]()
    stem = "model.layers.0.self_attn"
    others = {f"{stem}.q_norm.scale": torch.ones(8), f"{stem}.q_proj_norm_scale": torch.ones(8), "scale": torch.ones(1)}
    files.tensors |= others
    checkpoint = io.read(files.write(tmp_path / "a"))
    assert others.keys() <= checkpoint.plain.keys()
    io.write(tmp_path / "b", checkpoint, dialect="modelopt")
    assert raw(tmp_path / "b") == raw(tmp_path / "a")


def test_a_checkpoint_of_a_dialect_may_have_no_other_codes(tmp_path):
    """As with E5M2 in a file of a dialect that has E4M3 only."""
    for number, dtype in enumerate((E5M2, *FNUZ)):
        files = KINDS["modelopt FP8"]()
        files.tensors["model.layers.9.mlp.weight"] = codes(dtype)
        with pytest.raises(io.CheckpointError, match="no scale for it") as caught:
            io.read(files.write(tmp_path / str(number)))
        assert caught.value.tensor == "model.layers.9.mlp.weight"


def test_vectors_of_bytes_are_plain(tmp_path):
    """Such as masks, and texts: no weights."""
    tensors = {
        "a.weight": torch.ones(32, 64),
        "mask": torch.ones(32, 64, dtype=U8),
        "b.weight": torch.ones(3, dtype=U8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert io.read(tmp_path).plain.keys() == tensors.keys()


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (8, 4, 3), (8, 4, 1, 3, 3), (8,)], ids=str)
@pytest.mark.parametrize(
    ("scale", "beside"),
    [
        ("scale_weight", {"scaled_fp8": torch.zeros(0, dtype=E4M3)}),
        ("weight_scale", {"c.comfy_quant": torch.tensor([*b'{"format": "float8_e4m3fn"}'], dtype=U8)}),
        ("scale", {}),
    ],
    ids=["older ComfyUI", "ComfyUI", "no dialect"],
)
def test_codes_of_convolutions_are_refused_by_the_name_of_their_weight(shape, scale, beside, tmp_path):
    weight = torch.ones(shape).to(E4M3)
    tensors = {"a.weight": codes(E4M3), f"a.{scale}": torch.ones(1), "c.weight": weight, f"c.{scale}": torch.ones(1)}
    if "c.comfy_quant" in beside:
        tensors["a.comfy_quant"] = beside["c.comfy_quant"].clone()
    if scale == "scale":  # which no layer has
        del tensors["a.weight"], tensors["a.scale"]
    source = Files(tensors | beside).write(tmp_path / "a")
    for call in (io.read, lambda path: io.load(model(), path, strict=False)):
        with pytest.raises(io.CheckpointError, match="quantized weights of two dimensions only") as caught:
            call(source)
        assert caught.value.tensor == "c.weight" and f"float8_e4m3fn {list(shape)}" in str(caught.value)
        assert "export the model with this layer in bfloat16" in caught.value.remedy
        assert caught.value.file.endswith("model.safetensors")
