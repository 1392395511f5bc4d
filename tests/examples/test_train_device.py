"""The training example on a device: the CPU's losses, bit for bit, and one sentence where there is no such device."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quire

pytestmark = pytest.mark.slow

for needed in ("tqdm", "matplotlib"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"examples/train needs {needed}", allow_module_level=True)

TESTS = Path(__file__).resolve().parents[1]
FOLDER = TESTS.parent / "examples/train"
#: The test device is made known to PyTorch before the program begins, as the package of a device would do.
PROGRAM = f"""
import runpy, sys
sys.path[:0] = [{str(TESTS)!r}, {str(FOLDER)!r}]
import examples.composed_functions
if "quiretest" in sys.argv:
    import device.device
runpy.run_path({str(FOLDER / "train.py")!r}, run_name="__main__")
"""
SIZE = "--layers 1 --width 64 --seq 32 --batch 4 --steps 5 --validation-batches 2 --dtype fp32 --backend aot_eager"
TEST_DEVICE = Path(quire.__file__).with_name("lib").resolve().parent / "tests/device/libtestdevice.so"


def train(*arguments):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *SIZE.split(), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "QUIRE_TEST_DEVICE_ROWS": "host"},
        capture_output=True,
        text=True,
        timeout=900,
    )


def losses(out, *arguments):
    """Of each recipe: every training loss, and the validation loss."""
    done = train("--out", out, *arguments)
    assert done.returncode == 0, done.stderr
    runs = json.loads((out / "results.json").read_text())["runs"]
    return [{run["recipe"]: run[name] for run in runs} for name in ("losses", "validation_loss")]


@pytest.mark.skipif(not TEST_DEVICE.exists(), reason="the test device is not built")
def test_the_losses_on_a_device_are_those_of_the_cpu_and_a_resumed_run_goes_on(tmp_path):
    recipes = ("--recipe", "fp8_delayed,nvfp4")
    expected, validation = losses(tmp_path / "cpu", *recipes)
    assert len(expected) == 2 and all(len(run) == 5 for run in expected.values())
    there = ("--device", "quiretest", *recipes)
    assert train("--out", tmp_path / "device", "--stop-after", 3, *there).returncode == 0
    found, validation_there = losses(tmp_path / "device", "--resume", *there)
    assert (found, validation_there) == (expected, validation)
    assert len({tuple(run) for run in found.values()}) == 2


def one_sentence(done):
    assert done.returncode == 1 and "Traceback" not in done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("train: --device ")
    return message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so():
    message = one_sentence(train("--device", "cuda"))
    assert "PyTorch" in message and message.endswith("; leave it out to train on the CPU")


def test_no_such_device_and_several_processes_are_refused():
    assert "leave it out to train on the CPU" in one_sentence(train("--device", "abacus"))
    assert "PyTorch" in one_sentence(train("--device", "meta"))
    if TEST_DEVICE.exists():
        done = train("--device", "quiretest", "--processes", 2, "--parallel", "tp")
        assert done.returncode == 1 and "--processes 2 share the CPU; got --device quiretest" in done.stderr
