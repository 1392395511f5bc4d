"""Checkpoints that other tools have written, with the values that these tools say they have (tests/peers/freeze.py).

A case is a folder of tests/golden/io: model.safetensors or model.gguf, its configurations, and expected.json: name of a
weight -> dtype and shape of the tool's own dequantized values, their digest, and the first of them to look at.
"""

import hashlib
import json
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[2] / "golden/io"
CASES = sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []


def summary(values: torch.Tensor, signed_zeros: bool = True) -> dict[str, object]:
    """What identifies values: every bit of them, but for the bits of NaNs. signed_zeros: whether -0 differs from 0."""
    values = values if signed_zeros else values + 0.0
    values = torch.where(values.isnan(), torch.full_like(values, float("nan")), values.detach()).contiguous()
    data = values.view(torch.uint8).numpy().tobytes()
    first = [repr(value) for value in values.flatten()[:8].tolist()]
    dtype = str(values.dtype).removeprefix("torch.")
    return {
        "signed_zeros": signed_zeros,
        "dtype": dtype,
        "shape": list(values.shape),
        "digest": hashlib.sha256(data).hexdigest()[:32],
        "first": first,
    }


def expected(case: str) -> dict[str, dict[str, object]]:
    return json.loads((FOLDER / case / "expected.json").read_text())
