"""A CUDA row that is wrong on a device: it is found at its first use, said once, and not used. In processes of their
own, whose kernels run on the emulator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire

PTX = Path(quire.__file__).with_name("lib").resolve().parent / "tests/cuda"
pytestmark = pytest.mark.skipif(not (PTX / "self_check.ptx").exists(), reason="this build has no CUDA kernels")

PROGRAM = """
import json, sys, warnings
import torch, quire
from device import device as testdevice

x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
expected = torch.ops.quire.quantize(x, "mxfp8", True, True)
on_device, told, checks, calls = x.to(testdevice.NAME), [], [], []
def same(found):
    return all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    testdevice.counts()
    if "captured" in sys.argv:
        with testdevice.Graph() as graph:
            captured = torch.ops.quire.quantize(on_device, "mxfp8", True, True)
        graph.replay()
        calls.append(same(captured)), checks.append(testdevice.counts().get("self-check", 0))
    for _ in range(2):
        calls.append(same(torch.ops.quire.quantize(on_device, "mxfp8", True, True)))
        checks.append(testdevice.counts().get("self-check", 0))
told = [str(one.message) for one in heard]
# Codes of one direction are a kind of problem of their own, of which nobody is told any more.
kernels = [(k.name, k.verdict) for k in quire.explain(quire.quantize, on_device, "mxfp8").steps[0].kernels]
print(json.dumps([told, checks, calls, kernels]))
"""


def ran(*arguments, **environment):
    """Warnings; self-checks and whether results are right, of each call; kernels with their verdicts."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"QUIRE_TEST_DEVICE_ROWS": "cuda", "PYTHONPATH": path} | environment
    environment.pop("QUIRE_KERNEL", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    told, checks, calls, kernels = json.loads(done.stdout.splitlines()[-1])
    # Where PyTorch has no Python around the call, its warnings are lines of stderr.
    told += [line for line in done.stderr.splitlines() if "self-check" in line]
    return told, checks, calls, dict(kernels)


@pytest.fixture
def broken(tmp_path):
    """A kernel that rounds to another format in the place of the one for mxfp8."""
    text = (PTX / "tiles_fp8.ptx").read_text()
    for name, to in (("mxfp8_f32", "another"), ("mxfp8_e5m2_f32", "mxfp8_f32"), ("another", "mxfp8_e5m2_f32")):
        assert text.count(f".entry {name}(") == 1
        text = text.replace(f".entry {name}(", f".entry {to}(")
    (tmp_path / "tiles_fp8.ptx").write_text(text)
    return {"QUIRE_PTX_INSTEAD": f"tiles_fp8.ptx={tmp_path / 'tiles_fp8.ptx'}"}


def test_a_row_that_is_right_is_checked_once():
    told, checks, calls, kernels = ran()
    assert (told, checks, calls) == ([], [1, 0], [True, True])
    assert kernels == {"tiles": "runs", "reference": "not asked, tiles comes first"}


def test_a_row_that_is_wrong_is_named_once_and_the_next_one_computes(broken):
    told, checks, calls, kernels = ran(**broken)
    assert (checks, calls) == ([1, 0], [True, True])
    assert len(told) == 1 and "kernel 'tiles' of quantize failed its self-check on quiretest:0" in told[0]
    assert kernels["tiles"].startswith("its self-check failed on this device: ") and kernels["reference"] == "runs"


def test_a_captured_stream_is_not_waited_for_and_the_next_eager_use_finds_the_row_wrong(broken):
    told, checks, calls, kernels = ran("captured", **broken)
    assert (checks, calls) == ([0, 1, 0], [False, True, True])
    assert len(told) == 1 and kernels["reference"] == "runs"


def test_without_self_checks_a_row_is_used_as_it_is(broken):
    told, checks, calls, kernels = ran(QUIRE_SELF_CHECK="off", **broken)
    assert (told, checks, calls) == ([], [0, 0], [False, False]) and kernels["tiles"] == "runs"


def test_another_setting_is_an_error():
    with pytest.raises(AssertionError, match="QUIRE_SELF_CHECK is 'never'; it may be off, or not set"):
        ran(QUIRE_SELF_CHECK="never")
