"""Checkpoints of other tools: what is read decodes as their formulas say, and is written back byte for byte."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from python.io.checkpoint_files import configs, raw
from python.io.checkpoint_kinds import KINDS
from quire import io

pytestmark = pytest.mark.any_device


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("shards", [1, 4])
def test_reading_and_writing_gives_the_same_bytes_and_configuration(kind, shards, tmp_path):
    torch.manual_seed(0)
    files = KINDS[kind]()
    source = files.write(tmp_path / "a", shards)
    checkpoint = io.read(source)
    assert sorted(checkpoint.groups) == sorted(files.values)
    report = io.write(
        tmp_path / "b", checkpoint, dialect=kind.split()[0], max_shard_size="5kB" if shards > 1 else "5GB"
    )
    assert raw(tmp_path / "b") == raw(source)
    assert configs(tmp_path / "b") == configs(source)
    assert report.layers == len(files.values) and report.losses == ()
    assert shards == 1 or "one tensor" in kind or len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    assert not io.diff(source, tmp_path / "b")


def test_decoded_values_are_those_of_the_formula(kind, tmp_path):
    torch.manual_seed(0)
    files = KINDS[kind]()
    checkpoint = io.read(files.write(tmp_path))
    for name, expected in files.values.items():
        values = checkpoint[name].dequantize(torch.float32).numpy()
        assert values.shape == expected.shape
        assert np.array_equal(values, expected.astype(np.float32), equal_nan=True)


def test_the_outline_has_the_shapes_and_dtypes_of_what_is_read(kind, tmp_path):
    checkpoint = io.read(KINDS[kind]().write(tmp_path))
    for name, value in checkpoint.items():
        outline = checkpoint.outline(name)
        pairs = [(outline, value)]
        if isinstance(value, io.StoredWeight):
            assert outline.weight.spec == value.weight.spec and outline.origin.names == value.origin.names
            pairs = list(zip(outline.weight.buffers().values(), value.weight.buffers().values(), strict=True))
        for one, other in pairs:
            assert one.is_meta and (one.shape, one.dtype) == (other.shape, other.dtype)


def test_quires_own_dialect_holds_every_kind(kind, tmp_path):
    files = KINDS[kind]()
    source = files.write(tmp_path / "a")
    unused = "unused" in kind  # a tensor that no layer has a place for
    if unused:
        with pytest.raises(io.CheckpointError, match="(input_scale|scale_input) has no place"):
            io.convert(source, tmp_path / "b", to="quire")
    losses = io.convert(source, tmp_path / "b", to="quire", exact=not unused).losses
    assert len(losses) == (len(files.values) if unused else 0)
    assert io.inspect(tmp_path / "b").dialect == "quire"
    assert not io.diff(source, tmp_path / "b")  # values, bit for bit
    own = io.read(tmp_path / "b")
    io.write(tmp_path / "c", own, dialect="quire")
    assert raw(tmp_path / "c") == raw(tmp_path / "b") and configs(tmp_path / "c") == configs(tmp_path / "b")
    original = io.read(source)
    for name in files.values:
        one, other = original[name], own[name]
        assert one.weight.spec == other.weight.spec
        for key, value in one.weight.buffers().items():
            assert torch.equal(value, other.weight.buffers()[key]), key
        assert (one.input_scale is None) == (other.input_scale is None)
        assert one.input_scale is None or torch.equal(one.input_scale, other.input_scale)
        assert torch.equal(one.bias, other.bias) if one.bias is not None else other.bias is None


def test_what_no_layer_has_is_copied_verbatim(kind, tmp_path):
    files = KINDS[kind]()
    if "model.counts" not in files.tensors:
        pytest.skip("has layers only")
    checkpoint = io.read(files.write(tmp_path / "a"))
    for name in ("model.counts", "model.layers.0.self_attn.k_proj.k_scale", "model.norm.weight"):
        assert (
            torch.equal(checkpoint[name], files.tensors[name]) and checkpoint[name].dtype == files.tensors[name].dtype
        )


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_converting_copies_the_files_beside_the_weights(name, tmp_path):
    source = KINDS["modelopt MXFP8"]().write(tmp_path / "a")
    (source / name).write_text('{"kept": true}')
    io.convert(source, tmp_path / "b", to="compressed-tensors")
    assert json.loads((tmp_path / "b" / name).read_text()) == {"kept": True}
    assert not (tmp_path / "b/hf_quant_config.json").exists()  # it would contradict config.json


def test_every_dtype_of_the_container_is_kept(tmp_path):
    tensors = {
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "e8m0": torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "e5m2": torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2),
        "f4": torch.arange(16, dtype=torch.uint8).reshape(2, 8).view(torch.float4_e2m1fn_x2),
        "f64": torch.randn(3, dtype=torch.float64),
        "u16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 5),
        "odd": torch.arange(3, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"kept": "yes"})
    checkpoint = io.read(tmp_path / "model.safetensors", scale=1)
    assert checkpoint["f4"].shape == (2, 8)
    io.write(tmp_path / "b", checkpoint, dialect=None)
    assert raw(tmp_path / "b") == raw(tmp_path)
    back = load_file(tmp_path / "b/model.safetensors")  # the library reads what we write
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
    assert io.read(tmp_path / "b", scale=1).metadata["kept"] == "yes"
    content = (tmp_path / "b/model.safetensors").read_bytes()  # aligned, for readers that map files
    length = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % tensors[name].element_size() == 0, name


@pytest.mark.cpu_only
def test_without_safetensors_an_error_says_what_to_install(tmp_path, monkeypatch):
    source = KINDS["modelopt FP8"]().write(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        io.read(source)


def test_shards_are_no_larger_than_asked(tmp_path):
    source = KINDS["modelopt NVFP4"]().write(tmp_path / "a")
    for size in (4000, "8kB", "8KiB"):
        io.write(tmp_path / "b", io.read(source), dialect="modelopt", max_shard_size=size, overwrite=True)
        index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
        tensors = raw(tmp_path / "b")
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(len(content) for *_, content in tensors.values())
        assert raw(tmp_path / "b") == raw(source)
    entries = [
        sum(len(tensors[n][2]) for n in tensors if n.startswith(stem)) for stem in ("model.layers.0.self_attn.q_p",)
    ]
    sizes = [file.stat().st_size for file in (tmp_path / "b").glob("*.safetensors")]
    assert max(sizes) < max(8192, *entries) + 1024


def test_what_was_read_does_not_change_with_the_file(tmp_path):
    file = KINDS["modelopt NVFP4"]().write(tmp_path) / "model.safetensors"
    checkpoint = io.read(tmp_path)
    values = {
        name: checkpoint[name] for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
    }
    plain, stored = values.values()
    before = plain.clone(), stored.dequantize().clone()
    with file.open("r+b") as out:
        length = int.from_bytes(out.read(8), "little")
        out.seek(8 + length)
        out.write(bytes(file.stat().st_size - 8 - length))
    assert torch.equal(plain, before[0])
    assert torch.equal(stored.dequantize().nan_to_num(), before[1].nan_to_num())


def test_looking_for_a_name_reads_nothing(tmp_path, monkeypatch):
    checkpoint = io.read(KINDS["modelopt NVFP4"]().write(tmp_path))
    monkeypatch.setattr(checkpoint.container, "tensor", None)
    assert "model.norm.weight" in checkpoint and "model.layers.0.self_attn.q_proj.weight" in checkpoint
    assert "model.layers.0.self_attn.q_proj.weight_scale" not in checkpoint and 3 not in checkpoint
    assert len(checkpoint) == len(list(checkpoint))
