"""The policy that is trained by rewards: its server and its trainer compute the same log-probabilities."""

import re
from pathlib import Path

import pytest

from forks import as_torchrun

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "reinforce" / "reinforce.py"
LINE = re.compile(r"(\w+) step +(\d+): reward ([\d.]+), (\d+) of (\d+) log-probabilities differ, refit [\d.]+ ms")


def run(*arguments: str) -> tuple[list[tuple[str, ...]], list[int]]:
    """What the first process says of each step, and the exit status of both."""
    ranks = as_torchrun(SCRIPT, 2, "--quick", *arguments, seconds=600)
    assert not any("Traceback" in rank.stderr for rank in ranks), "\n".join(rank.stderr for rank in ranks)
    return LINE.findall(ranks[0].stdout), [rank.returncode for rank in ranks]


def test_no_log_probability_of_the_server_differs_from_the_trainers():
    steps, status = run()
    assert [(recipe, number) for recipe, number, *_ in steps] == [
        (recipe, str(number)) for recipe in ("mxfp8", "nvfp4") for number in (1, 2, 3)
    ]
    # Two processes, six texts each, twelve tokens behind the prompt.
    assert {(differing, count) for *_, differing, count in steps} == {("0", "144")} and status == [0, 0]


def test_weights_with_other_scales_are_seen():
    steps, status = run("--inference-scales", "nvfp4")
    assert len(steps) == 3 and all(int(differing) > 100 for *_, differing, _ in steps) and status == [1, 1]
