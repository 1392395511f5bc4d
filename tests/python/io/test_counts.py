"""What inspect, read, load and save say of how much a checkpoint has, and of how its layers are stored."""

import re

import pytest
import torch

import quire
from python.io.checkpoint_files import Files, modelopt_config, modelopt_nvfp4, plain_scales
from python.io.checkpoint_kinds import KINDS
from quire import io
from quire.io.dialects import DIALECTS, dialect_named


class Attention(torch.nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        if fused:
            self.qkv_proj = torch.nn.Linear(64, 96)
        else:
            for name in "qkv":
                setattr(self, f"{name}_proj", torch.nn.Linear(64, 32))
        self.o_proj = torch.nn.Linear(32, 64, bias=False)


@pytest.fixture
def folder(tmp_path):
    """Three layers with a bias, a plain layer without, a norm and two scales of caches."""
    tensors = {"norm.weight": torch.ones(64), "norm.bias": torch.ones(64), "o_proj.weight": torch.ones(64, 32)}
    for name in "qkv":
        stem = f"{name}_proj"
        tensors |= modelopt_nvfp4(stem, 32, 64, scale2=0.5, scales=plain_scales(32, 4))[0]
        tensors[f"{stem}.input_scale"], tensors[f"{stem}.bias"] = torch.tensor(0.5), torch.zeros(32)
    tensors |= {f"{name}_proj.{name}_scale": torch.tensor(1.0) for name in "kv"}
    return Files(tensors, modelopt_config("NVFP4")).write(tmp_path / "source")


@pytest.mark.parametrize("fused", [False, True])
def test_every_report_counts_a_bias_with_its_layer(folder, fused, tmp_path):
    model, expected = Attention(fused), "3 quantized layers, 3 plain tensors, 2 scales of caches"
    loaded = io.load(model, folder, fuse=fused or None)
    saved = io.save(model, tmp_path / "saved")
    assert loaded.contents == saved.contents == expected
    assert str(loaded).splitlines()[0] == f"{folder}: modelopt, {expected}"
    assert str(saved).startswith(f"{expected}; in all 20 tensors, ")
    for path in (folder, tmp_path / "saved"):
        assert f"modelopt, {expected})" in repr(io.read(path))
        assert expected == re.sub(" of [0-9.]+ kB", "", str(io.inspect(path)).splitlines()[1].partition("; ")[2])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_counted_as_it_was_read(kind, tmp_path):
    source = KINDS[kind]().write(tmp_path / "source")
    checkpoint = io.read(source)
    if checkpoint.dialect is None or getattr(dialect_named(checkpoint.dialect), "read_only", False):
        pytest.skip("quire does not write it")
    report = io.write(tmp_path / "again", checkpoint, dialect=checkpoint.dialect)
    assert f", {report.contents})" in repr(checkpoint) and f", {report.contents})" in repr(io.read(tmp_path / "again"))


def test_every_part_of_the_name_of_a_layout_is_explained():
    for dialect in DIALECTS:
        for layout in dialect.layouts:
            words = dialect.meaning(layout.name)
            assert (words != "") or ":" not in layout.name or layout.name == f"MXTensor:{layout.spec}", layout.name
            parts = layout.name.split(":")[1:]
            unnamed = [part for part in parts if part not in dialect.words and part not in ("mxfp8", "mxfp4")]
            if dialect.name != "compressed-tensors" and not layout.name.startswith("scaled_fp8"):
                assert not unnamed, layout.name


@pytest.mark.parametrize(
    "name, words",
    [
        (
            "mxfp8-quantized:group:group",
            "a scale for each block of a row of the weight; "
            "each block of a row of the inputs gets a scale in each call",
        ),
        ("float-quantized:channel:none", "a scale for each row of the weight; inputs are not quantized"),
        ("float-quantized:tensor:static", "one scale for the weight; the scale of the inputs is in the file"),
    ],
)
def test_a_name_means_what_the_layer_does(name, words):
    dialect = next(it for it in DIALECTS if it.name == "compressed-tensors")
    layout = dialect.layout(name)
    assert dialect.meaning(name) == words
    assert (layout.dynamic == "none") == words.endswith("inputs are not quantized")
    assert layout.calibrated == words.endswith("in the file")


#: Layers with biases of every name, and what is counted of them.
NAMED = {
    "one layer": (lambda: quire.Linear(64, 64), "1 quantized layer, 0 plain tensors"),
    "numbers": (lambda: quire.GroupedLinear(3, 64, 64), "3 quantized layers, 0 plain tensors"),
    "two matmuls": (lambda: quire.LayerNormMLP(64, 128), "2 quantized layers, 2 plain tensors"),
    "experts": (lambda: quire.MoE(64, 128, num_experts=8, bias=True), "16 quantized layers, 1 plain tensor"),
    "a stack": (
        lambda: quire.MoE(64, 128, num_experts=8, bias=True, single_grouped_weight=True),
        "2 quantized layers, 1 plain tensor",
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_bias_of_any_name_counts_with_its_layer(kind, tmp_path):
    make, expected = NAMED[kind]
    model = make()
    quire.convert(model, "mxfp8", for_inference=True, tokens=None)
    saved = io.save(model, tmp_path / "a", dialect="quire")
    found = io.inspect(tmp_path / "a")
    loaded = make()
    assert {io.load(loaded, tmp_path / "a").contents, saved.contents} == {expected} and not found.problems
    biases = [name for name, _ in model.named_parameters() if "bias" in name and "norm" not in name]
    assert biases and not set(biases) & found.plain.keys()
    for name, value in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name).detach(), value.detach()), name


def test_the_experts_of_a_mixture_share_a_line(tmp_path):
    model = quire.MoE(64, 128, num_experts=8, top_k=2, bias=True)
    quire.convert(model, "mxfp8", for_inference=True, tokens=None)
    io.save(model, tmp_path / "a", dialect="quire")
    lines = [line.split()[:2] for line in str(io.inspect(tmp_path / "a")).splitlines()[3:]]
    assert lines == [["fc1.weight*", "8"], ["fc2.weight*", "8"], ["router.weight", "1"]]


def test_the_table_of_a_checkpoint_ends_with_what_its_names_mean(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    quire.convert(model, "mxfp8", for_inference=True, tokens=None, min_features=1)
    io.save(model, tmp_path / "a", dialect="compressed-tensors")
    last = str(io.inspect(tmp_path / "a")).splitlines()[-1]
    assert last.startswith("stored as mxfp8-quantized:group:group: a scale for each block of a row of the weight; ")
    io.save(model, tmp_path / "b", dialect="quire")
    assert "stored as m" not in str(io.inspect(tmp_path / "b"))
