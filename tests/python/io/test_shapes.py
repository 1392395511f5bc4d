"""A weight of a shape that the tools of a dialect do not read is not written as that dialect; verify() reports it."""

import pytest
import torch

import quire
from python.io.checkpoint_files import (
    E4M3,
    F32,
    Files,
    bytes_of,
    e2m1,
    every_byte,
    modelopt_config,
    plain_scales,
    spread,
)
from quire import io

pytestmark = pytest.mark.any_device

COLUMNS_16, COLUMNS_32 = "columns in multiples of 16", "columns in multiples of 32"
TILES = "rows in multiples of 128 or less and columns in multiples of 128 or less"
#: Recipe, dialect, a shape that its tools do not read, what the error says, and one that they read.
SHAPES = [
    ("x=none,w=nvfp4:global=div", "compressed-tensors", (64, 72), COLUMNS_16, (72, 80)),
    ("x=nvfp4:global=div:given,w=nvfp4:global=div,dy=mxfp8", "compressed-tensors", (64, 72), COLUMNS_16, (72, 80)),
    ("mxfp4", "compressed-tensors", (64, 80), COLUMNS_32, (72, 96)),
    ("x=none,w=mxfp8", "compressed-tensors", (64, 80), COLUMNS_32, (72, 96)),
    ("x=none,w=fp8_block:128x128", "compressed-tensors", None, "", (72, 200)),
    ("x=none,w=nvfp4:global=mul", "modelopt", (64, 72), COLUMNS_16, (72, 80)),
    ("x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8", "modelopt", (64, 72), COLUMNS_16, (72, 80)),
    ("mxfp8", "modelopt", (64, 80), COLUMNS_32, (72, 96)),
    ("x=none,w=fp8_block:128x128", "modelopt", None, "", (72, 200)),
    ("mxfp8", "deepseek", (64, 80), COLUMNS_32, (72, 96)),
    ("x=fp8_block:pow2,w=mxfp4,dy=mxfp8", "deepseek", (64, 80), COLUMNS_32, (72, 96)),
    ("fp8_block", "deepseek", None, "", (72, 200)),
    ("x=none,w=nvfp4:global=mul", "torchao", (64, 72), COLUMNS_16, (72, 80)),
    ("mxfp8", "torchao", (64, 80), COLUMNS_32, (72, 96)),
    ("x=none,w=mxfp4", "torchao", (64, 80), COLUMNS_32, (72, 96)),
    ("x=none,w=fp8_block:128x128", "torchao", (64, 200), TILES, (64, 256)),
    ("x=none,w=fp8_block:128x128", "torchao", (200, 64), TILES, (256, 64)),
    ("x=none,w=nvfp4:global=mul", "comfyui", (56, 64), "rows in multiples of 16 and columns in mult", (48, 80)),
    ("mxfp8", "comfyui", (104, 64), "rows in multiples of 32 and columns in multiples of 32", (64, 96)),
]


def quantized(recipe: str, shape: tuple[int, int]) -> torch.nn.Module:
    rows, columns = shape
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(columns, rows, bias=False)}).requires_grad_(False)
    model.forward = lambda x: model["a"](x)
    return quire.quantize_model(model, recipe, [torch.randn(4, columns)] if ":given" in recipe else None)


@pytest.mark.parametrize(("recipe", "dialect", "wrong", "text", "right"), SHAPES)
def test_a_shape_that_tools_do_not_read_is_not_written(recipe, dialect, wrong, text, right, tmp_path):
    if wrong is not None:
        with pytest.raises(
            io.CheckpointError, match=rf"{dialect}.*{text}.*\[{wrong[0]}, {wrong[1]}\]; .*fil"
        ) as caught:
            io.save(quantized(recipe, wrong), tmp_path, dialect=dialect)
        assert caught.value.tensor == "a.weight" and not list(tmp_path.iterdir())
        assert io.save(quantized(recipe, wrong), tmp_path / "own", dialect="quire").layers == 1
        assert io.verify(tmp_path / "own")
    assert io.save(quantized(recipe, right), tmp_path / "a", dialect=dialect).layers == 1
    assert io.verify(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("m.down_proj", (2, 64, 48), r"columns in multiples of 32, got a weight of \[2, 64, 48\]"),
        ("m.gate_up_proj", (2, 31, 64), "rows in multiples of 2 and columns in multiples of 32, got"),
        ("m.down_proj", (31, 64), "stores all experts of a layer"),
    ],
)
def test_experts_of_gpt_oss_have_whole_blocks_and_pairs_of_rows(name, shape, text, tmp_path):
    matrices = [quire.quantize(torch.randn(shape[-2:]), "mxfp4") for _ in range(shape[0] if len(shape) == 3 else 1)]
    weight = quire.QuantizedStack.of(matrices) if len(shape) == 3 else matrices[0]
    kind = "mxfp4:gate_up" if "gate" in name else "mxfp4"
    stored = io.StoredWeight(weight, None, None, io.Origin("gpt_oss", kind))
    with pytest.raises(io.CheckpointError, match=text):
        io.write(tmp_path / "a", {name: stored}, dialect="gpt_oss")
    assert not (tmp_path / "a").exists()


def test_a_conversion_of_values_is_refused_as_a_save_is(tmp_path):
    io.write(tmp_path / "a", {"a.weight": torch.randn(64, 72)}, dialect=None)
    with pytest.raises(io.CheckpointError, match=COLUMNS_16):
        io.convert(
            tmp_path / "a", tmp_path / "b", to="modelopt", requantize="nvfp4:global=mul", filter=lambda name: True
        )
    assert not (tmp_path / "b").exists()


def test_a_file_with_such_a_shape_is_read_and_verify_reports_it(tmp_path):
    data, scales = every_byte(32, 36), plain_scales(32, 5)
    tensors = {"a.weight": data, "a.weight_scale": scales, "a.weight_scale_2": torch.tensor(0.5, dtype=F32)}
    source = Files(tensors, modelopt_config("W4A16_NVFP4")).write(tmp_path / "a")
    problem = (
        f"a.weight: tools that read W4A16_NVFP4 need {COLUMNS_16}, got a weight of [32, 72], which only quire reads"
    )
    assert io.inspect(source).problems == (problem,)
    found = io.verify(source)
    assert not found and found.problems == (problem,) and [layer.name for layer in found.layers] == ["a.weight"]
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(72, 32, bias=False)})
    io.load(model, source)
    values = e2m1(bytes_of(data)) * spread(scales.float().cpu().numpy() * 0.5, 16, 72)
    assert torch.equal(model["a"].weight.dequantize(torch.float32).cpu(), torch.from_numpy(values))
    assert E4M3 == scales.dtype
