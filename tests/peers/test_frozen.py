"""tests/golden/io is what the pinned tools make."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from python.io.stored_golden import CASES, FOLDER, expected

FREEZE = Path(__file__).parent / "freeze.py"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_case_is_made_again(case, tmp_path):
    done = subprocess.run(
        [sys.executable, FREEZE, "--one", "--out", tmp_path, case], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    made = {file.name for file in (tmp_path / case).iterdir()}
    assert made == {file.name for file in (FOLDER / case).iterdir()}
    assert (tmp_path / case / "expected.json").read_text() == (FOLDER / case / "expected.json").read_text()
    if "model.safetensors" in made:
        one, other = (load_file(folder / case / "model.safetensors") for folder in (tmp_path, FOLDER))
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert tensor.dtype == other[name].dtype, name
            assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (tensor, other[name]))), name


def test_every_case_is_kept():
    listed = subprocess.run([sys.executable, FREEZE, "--list"], capture_output=True, text=True, check=True).stdout
    assert sorted(listed.split()) == CASES and all(expected(case) for case in CASES)
