"""Tests that take a device have cases for a GPU: where there is none, one line counts them, and QUIRE_REQUIRE_CUDA=1
makes them a failure."""

import os
import re
import subprocess
import sys

import pytest

from workspace import ROOT

TESTS = "tests/python/golden/test_quantize.py"


@pytest.mark.parametrize("required", ["0", "1"])
@pytest.mark.parametrize("options", [[], ["--device", "cuda"]], ids=["everyday", "cuda"])
def test_cases_for_a_gpu_are_counted_in_one_line(options, required):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *options, TESTS]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "QUIRE_REQUIRE_CUDA": required}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == int(required == "1"), done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("cuda: ")]
    assert len(lines) == 1 and re.match(r"cuda: [1-9]\d* cases skipped, ", lines[0]), done.stdout
    assert ("which QUIRE_REQUIRE_CUDA=1 makes a failure" in lines[0]) == (required == "1")
    ran = [] if options else ["passed"]
    assert re.findall("passed|failed|skipped$", done.stdout.splitlines()[-1]) == ran
