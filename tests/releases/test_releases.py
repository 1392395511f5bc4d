"""Checkpoints and exported programs that earlier releases wrote load in this one, to the values stored beside them."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import quire
import torch_pin

HERE = Path(__file__).parent
RELEASES = sorted(path.parent for path in HERE.glob("*/values.json"))
KINDS = {"checkpoint.pt", "exported.pt2", "values.pt", "values.json"}

pytestmark = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)


def writer():
    spec = importlib.util.spec_from_file_location("write_release", HERE / "write.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.fixture
def values(release) -> dict:
    return torch.load(release / "values.pt", weights_only=True)


@pytest.fixture
def checkpoint(release) -> dict:
    return torch.load(release / "checkpoint.pt", weights_only=True)


def test_a_release_has_every_file(release):
    assert {path.name for path in release.iterdir()} == KINDS
    assert json.loads((release / "values.json").read_text())["written by"]["quire"] == release.name


def test_quantized_weights_have_the_values_that_were_saved(release, checkpoint, values):
    model = writer().quantized()
    model.load_state_dict(checkpoint["model"])
    for name, layer in model.items():
        assert isinstance(layer.weight, quire.QuantizedTensor)
        assert same_bits(layer.weight.detach().dequantize(), values[f"{name}.weight"]), name


def test_a_stack_has_the_values_that_were_saved(release, checkpoint, values):
    assert isinstance(checkpoint["stack"], quire.QuantizedStack)
    for matrix in checkpoint["stack"].dequantize():
        assert same_bits(matrix, values["mxfp8.weight"])


def test_the_state_of_delayed_scaling_goes_on_from_what_was_saved(release, checkpoint):
    expected = json.loads((release / "values.json").read_text())["delayed"]
    layer = writer().with_state()
    layer.load_state_dict(checkpoint["stateful"])
    quire.set_delayed_state(layer, checkpoint["delayed"])
    quire.set_rng_state(layer, checkpoint["rng"])
    state = quire.delayed_state(layer)["delayed"]
    assert {name: state[name].tolist() for name in expected} == expected
    assert torch.equal(quire.rng_state(layer)[""], checkpoint["rng"][""])
    writer().step(layer, 4.0)
    scale = quire.delayed_state(layer)["delayed"]["scale_fwd"]
    assert scale[0] == 448 / 2, "of the largest saved amax: that of this step counts from the next one on"


def test_an_exported_program_computes_what_plain_arithmetic_gave(release, values):
    by = json.loads((release / "values.json").read_text())["written by"]["torch"]
    if torch_pin.minor(torch.__version__) < torch_pin.minor(by):
        pytest.skip(f"PyTorch {torch.__version__} does not promise to read what PyTorch {by} exported")
    program = torch.export.load(release / "exported.pt2").module()
    with torch.no_grad():
        assert torch.equal(program(values["x"]), values["y"])
