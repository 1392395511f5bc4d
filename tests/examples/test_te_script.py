"""A script written for TransformerEngine trains with only its imports changed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples/te_script.py"


def test_the_script_trains(tmp_path):
    paths = os.pathsep.join([str(SCRIPT.parents[1] / "python"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, SCRIPT], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", process.stdout)]
    assert len(losses) == 20 and losses[-1] < losses[0]  # of the same microbatches
