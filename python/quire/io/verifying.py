"""Every rule of a checkpoint, values included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.io.inspection import Inspection, inspect, table
from quire.io.reading import Checkpoint, read
from quire.io.stored import StoredWeight
from quire.loading.float_mode import subnormals_kept


@dataclass(frozen=True)
class LayerCheck:
    """A quantized layer. saturated: share of the codes at the largest magnitude. sqnr: signal to quantization noise in
    dB against the original, None without one."""

    name: str
    saturated: float
    sqnr: float | None


@dataclass(frozen=True)
class Verification:
    """The result of verify(). str() gives a table; it is true if there are no problems.

    inspection: the result of inspect(). layers: for each quantized layer its name, the share of saturated codes and the
    signal to noise ratio. problems: the broken rules, in words; empty if there are none.
    """

    inspection: Inspection
    layers: tuple[LayerCheck, ...]
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether nothing was found."""
        return not self.problems

    def __str__(self) -> str:
        worst = sorted(self.layers, key=lambda one: (one.sqnr if one.sqnr is not None else 0, -one.saturated))[:10]
        rows = [("layer", "saturated", "SQNR"), *((w.name, f"{w.saturated:.2%}", _decibels(w.sqnr)) for w in worst)]
        head = f"{self.inspection.path}: {len(self.layers)} layers checked, {len(self.problems)} problems"
        lines = [head, *(f"problem: {problem}" for problem in self.problems)]
        return "\n".join([*lines, *(table(rows) if worst else ())])

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        layers = [vars(layer) for layer in self.layers]
        return {"path": self.inspection.path, "layers": layers, "problems": list(self.problems)}


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} dB"


@subnormals_kept()
def verify(path: str | Path, like: str | Path | None = None) -> Verification:
    """Checks every rule of a checkpoint: names, dtypes and shapes as inspect() does, and the values of every quantized
    layer. Scales must be finite and not negative; codes and decoded values must not be NaN.

    path: as for read().
    like: a checkpoint of the same model in high precision. The report then has the signal to noise ratio of each layer.

    Broken rules are listed in the result. Raises CheckpointError only if a path has no readable checkpoint.
    """
    from tqdm import tqdm

    found = inspect(path)
    if found.problems:
        return Verification(found, (), found.problems)
    checkpoint = read(path, missing_input_scale="dynamic")
    original = None if like is None else read(like, missing_input_scale="dynamic")
    layers, problems = [], []
    # A bar appears after a second, where someone watches.
    for name in tqdm(checkpoint.groups, desc="quire.io.verify", unit="layer", delay=1, disable=None):
        layer, wrong = _check(name, checkpoint, original)
        layers.append(layer)
        problems += [f"{name}: {what}" for what in wrong]
    return Verification(found, tuple(layers), tuple(problems))


def _check(name: str, checkpoint: Checkpoint, original: Checkpoint | None) -> tuple[LayerCheck, list[str]]:
    stored, group, problems = checkpoint[name], checkpoint.groups[name], []
    for role, full in group.names.items():
        if role in ("data", "bias", "rowwise_data", "columnwise_data"):
            continue
        scale = checkpoint.container.tensor(full)
        if role in ("rowwise_scale", "columnwise_scale") and stored.weight.spec.family == "nvfp4":
            scale = scale.view(torch.float8_e4m3fn)
        problems += [f"{full}: {what}" for what in wrong_scales(scale, is_input=role == "input_scale")]
    values = stored.dequantize(torch.float32)
    bad = int((~torch.isfinite(values)).sum())
    problems += [f"{bad} values are NaN or infinite"] if bad else []
    sqnr = None
    if original is not None:
        if name not in original or tuple(original[name].shape) != tuple(values.shape):
            problems.append("the original has no weight of this name and shape")
        else:
            true = original[name]
            true = true.dequantize(torch.float32) if isinstance(true, StoredWeight) else true.float()
            noise = (values - true).double().square().sum()
            signal = true.double().square().sum()
            sqnr = float("inf") if noise == 0 else float(10 * torch.log10(signal / noise))
    return LayerCheck(name, saturated(stored), sqnr), problems


def wrong_scales(scale: torch.Tensor, *, is_input: bool) -> list[str]:
    """What a scale must not be."""
    # A byte without a dtype of its own is an exponent, of which 255 is NaN.
    values = scale.view(torch.float8_e8m0fnu).float() if scale.dtype == torch.uint8 else scale.float()
    found = {
        "NaN": torch.isnan(values),
        "infinite": torch.isinf(values),
        "negative": values < 0,
        "zero": (values == 0) & is_input,
    }
    return [f"{int(which.sum())} scales are {what}" for what, which in found.items() if bool(which.any())]


def saturated(stored: StoredWeight) -> float:
    """The share of codes at the largest magnitude."""
    data = stored.weight.rowwise_data
    if data.numel() == 0:
        return 0.0
    if stored.weight.spec.family in ("nvfp4", "mxfp4"):
        return float((((data & 7) == 7).float().mean() + ((data >> 4 & 7) == 7).float().mean()) / 2)
    return float(((data & 0x7F) == 0x7E).float().mean())
