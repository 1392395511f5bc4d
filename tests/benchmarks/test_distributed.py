"""The benchmark of several processes: every contender has its row, and sends the bytes that its division needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "distributed.py"
TOKENS, SIZE = 64, 128
RECIPES = [f"quire {name}" for name in ("fp8_current", "mxfp8", "nvfp4")]
#: Numbers -> bytes of an element where values are sent.
BYTES = {"torch float32": 4, "torch bfloat16": 2} | dict.fromkeys(RECIPES, 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Rows by division and numbers, and what was printed."""
    out = tmp_path_factory.mktemp("bench")
    sizes = f"--tokens {TOKENS} --size {SIZE} --blocks 1 --seconds 0.1".split()
    done = subprocess.run(
        [sys.executable, SCRIPT, *sizes, "--out", out], capture_output=True, text=True, env=os.environ, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "distributed.json").read_text())["rows"]
    return {(row["sharding"], row["numbers"]): row for row in found}, done.stdout


@pytest.mark.slow
def test_every_division_has_every_kind_of_numbers_beside_its_speed_on_one_process(finished):
    found, printed = finished
    divisions = ("", "tp", "sp", "sp, ring", "fsdp", "fsdp, codes")
    assert list(found) == [(name, each) for name in divisions for each in (RECIPES if "," in name else BYTES)]
    for (division, name), row in found.items():
        speed = row["tokens_per_second"]
        peers = division.split(",")[0]
        better = max(found[peers, peer]["tokens_per_second"] for peer in ("torch float32", "torch bfloat16"))
        assert row["x_better"] == pytest.approx(speed / better, rel=1e-14)  # of float64, by another formula
        alone = found["", name]["tokens_per_second"]
        assert row["efficiency"] == (pytest.approx(speed / alone / 2, rel=1e-14) if division else None)
        assert f"{'2, ' + division if division else '1':<16}{name:<20}{speed:>10.0f}" in printed
    assert "efficiency with tp over that of torch" in printed and "target 0.9" in printed


@pytest.mark.slow
def test_the_bytes_that_a_process_sends_are_those_of_its_collectives(finished):
    sent = {name: row["sent_bytes"] for name, row in finished[0].items()}
    y, norm, bias = TOKENS * SIZE, 2 * SIZE, SIZE  # elements of a tensor of all tokens, and of what is not divided
    weights = 2 * 4 * SIZE * SIZE
    others = norm + 4 * SIZE + bias
    for name, size in BYTES.items():
        assert sent["", name] == 0
        # y is summed, and dx: of two processes each sends half of it twice. And amaxes: of both weights, of the row
        # layer's x, of the column layer's dy, in two directions each.
        amaxes = 0 if name.startswith("torch") or name.endswith("mxfp8") else 8
        assert sent["tp", name] == 2 * y * size + 4 * amaxes, name
        # Parameters are gathered for forward and for backward, their gradients are reduced and scattered.
        assert sent["fsdp", name] == 3 * (weights + others) * size // 2, name
    # x and dy are gathered, y and dx reduced and scattered, and gradients of the norm summed.
    for name in ("torch float32", "torch bfloat16"):
        assert sent["sp", name] == (4 * y // 2 + norm) * BYTES[name]
    # Gathered are codes with scales: x for forward, x and dy twice for backward. The row layer's bias is summed too.
    values = (2 * y // 2 + norm + bias) * 2
    assert sent["sp", "quire mxfp8"] == values + 4 * (y + y // 32) // 2
    assert sent["sp", "quire nvfp4"] == values + 4 * (y // 2 + y // 16) // 2 + 4 * 12
    # Pieces are as many bytes as the whole.
    assert all(sent["sp, ring", name] == sent["sp", name] for name in RECIPES)
    # Of weights codes are gathered, for each pass in one direction, and two amaxes of each are reduced.
    codes = {"quire fp8_current": weights, "quire mxfp8": weights * 33 // 32, "quire nvfp4": weights * 9 // 16}
    for name, size in codes.items():
        amaxes = 0 if name.endswith("mxfp8") else 4
        assert sent["fsdp, codes", name] == size + (2 * others + weights + others) * 2 // 2 + 4 * amaxes, name
