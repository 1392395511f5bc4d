"""Checkpoints of other tools: what is read decodes as their formulas say, and is written back byte for byte."""

import json

import numpy as np
import pytest
import torch

from checkpoint_files import KINDS, configs, raw
from quire import io


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
    io.convert(source, tmp_path / "b", to="quire")
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
