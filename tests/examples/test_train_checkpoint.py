"""The demo's checkpoints: what is not, byte for byte, what was written ends in a message."""

import importlib
import random
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "train"


@pytest.fixture
def checkpoint(monkeypatch):
    """The module; its name and that of its neighbour are left free again."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("checkpoint", "settings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("checkpoint")
    for name in ("checkpoint", "settings"):
        del sys.modules[name]


@pytest.fixture
def saved(checkpoint, tmp_path):
    path = tmp_path / "nvfp4.pt"
    weights = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    checkpoint.save(path, {"model": {"weight": weights}, "settings": {}, "digest": "d"})
    return path, weights


def refused(checkpoint, path, *words):
    with pytest.raises(checkpoint.ExampleError) as error:
        checkpoint.load(path)
    message = str(error.value)
    assert str(path) in message and "delete it" in message and "weights_only" not in message and "\n" not in message
    assert all(word in message for word in words)


def test_what_was_written_is_read_by_the_demo_and_by_torch(checkpoint, saved):
    path, weights = saved
    for content in (checkpoint.load(path), torch.load(path, weights_only=True)):
        assert torch.equal(content["model"]["weight"], weights)
    assert not path.with_suffix(".unfinished").exists()


def test_no_flipped_bit_is_resumed_without_a_word(checkpoint, saved):
    path, weights = saved
    data, chance = path.read_bytes(), random.Random(0)
    tensor = data.index(weights.numpy().tobytes())
    places = {*range(0, 64), *range(tensor, tensor + 64), *range(len(data) - 128, len(data))}
    for place in sorted(places | set(chance.sample(range(len(data)), 200))):
        flipped = bytearray(data)
        flipped[place] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        refused(checkpoint, path)


def test_no_file_that_is_cut_short_is_resumed(checkpoint, saved):
    path, _ = saved
    data = path.read_bytes()
    for length in (0, 1, 2, 100, *range(1000, len(data), 997), len(data) - 65, len(data) - 64, len(data) - 1):
        path.write_bytes(data[:length])
        refused(checkpoint, path)
    path.write_bytes(data + b"\n")
    refused(checkpoint, path, "damaged")


OTHERS = {
    "text": b"hello",
    "bytes that are no text": bytes(range(256)),
    "an older version": None,
    "a pickle": b"\x80\x02}q\x00.",
}


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)
def test_no_other_file_ends_in_a_traceback(checkpoint, tmp_path, data, sealed):
    path = tmp_path / "nvfp4.pt"
    if data is None:
        torch.save({"version": 1}, path)
        data = path.read_bytes()
    path.write_bytes(data + checkpoint.SEAL + checkpoint.checksum(data) if sealed else data)
    refused(checkpoint, path)


def test_a_folder_is_no_checkpoint(checkpoint, tmp_path):
    with pytest.raises(checkpoint.ExampleError, match="cannot read checkpoint .*: Is a directory"):
        checkpoint.load(tmp_path)
