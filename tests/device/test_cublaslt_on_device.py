"""Products by cuBLASLt on the device. Each chip has a process of its own: which rows there are is chosen once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from device.cublaslt_steps import ON_CHIP

LIBRARY = Path(quire.__file__).with_name("lib") / "libquire_cuda.so"


@pytest.mark.skipif(not LIBRARY.exists(), reason="this build has no libquire_cuda.so, which needs nvcc")
@pytest.mark.parametrize("chip", ON_CHIP)
def test_layers_multiply_by_cublaslt_wait_for_nothing_and_replay(chip):
    environment = {**os.environ, "QUIRE_TEST_DEVICE_ROWS": "cuda", "QUIRE_TEST_DEVICE_CHIP": str(chip)}
    environment["QUIRE_SELF_CHECK"] = "off"  # the launches that are counted are those of the layers
    environment.pop("QUIRE_KERNEL", None)
    done = subprocess.run(
        [sys.executable, "-m", "device.cublaslt_steps", str(chip)],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == list(ON_CHIP[chip])
