"""The golden vectors of quantizers: reads them (golden.tar.xz, unpacked to a folder), and says what a device computes
otherwise."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.functional import quantize


@cache
def _bytes(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint8)


class Case:
    """One case: `id`, `spec` (its parameters) and its tensors, as case["x"] or, widened to float32, case.f32("x")."""

    def __init__(self, folder: Path, entry: dict) -> None:
        self.id: str = entry["id"]
        self.spec: dict = entry["spec"]
        self._folder = folder
        self._tensors: dict[str, dict] = entry["tensors"]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        dtype = np.dtype(tensor["dtype"]).newbyteorder("<")
        begin, count = tensor["offset"], int(np.prod(tensor["shape"])) * dtype.itemsize
        return _bytes(self._folder / tensor["file"])[begin : begin + count].view(dtype).reshape(tensor["shape"])

    def f32(self, name: str = "x") -> np.ndarray:
        """An input; float16 and bfloat16 are stored as bit patterns, and spec["input"] says which they are."""
        bits = self[name]
        if bits.dtype == np.float32:
            return bits
        if self.spec.get("input") == "f16":
            return bits.view(np.float16).astype(np.float32)
        return (bits.astype(np.uint32) << 16).view(np.float32)


class Golden:
    """All cases below a folder."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._entries: list[dict] = json.loads((self._folder / "manifest.json").read_text())["cases"]

    def cases(self, group: str | None = None) -> Iterator[Case]:
        """All cases, or those of one group: the part of the id before the slash."""
        for entry in self._entries:
            if group in (None, entry["id"].split("/")[0]):
                yield Case(self._folder, entry)

    def get(self, id: str) -> Case:
        return next(case for case in self.cases() if case.id == id)


# The vectors' names for buffers, of cases with both directions and with one.
_KINDS = [("codes", "data"), ("scale", "scale"), ("scale_inv", "scale"), ("amax", "amax")]
_SIDES = [("_row", "rowwise"), ("_col", "columnwise")]
_BOTH = [(kind + side, f"{direction}_{buffer}") for side, direction in _SIDES for kind, buffer in _KINDS]
_ONE = [("codes", "rowwise_data"), ("scale_inv", "rowwise_scale"), ("amax", "rowwise_amax")]


def _element(s: dict) -> str:
    return ":e5m2" if s["elem"] == "e5m2" else ""


def _per_tensor(s: dict) -> str:
    return (
        "fp8_tensor" + _element(s) + (":pow2" if s.get("pow2") else "") + (f":eps={s['eps']}" if s.get("eps") else "")
    )


def _block(s: dict) -> str:
    tile, pow2 = ":128x128" if s["dim"] == 2 else "", ":pow2" if s["pow2"] else ""
    return "fp8_block" + _element(s) + tile + pow2 + (f":eps={s['eps']}" if s["eps"] else "")


def _nvfp4(s: dict) -> str:
    tile, row_scaled = ":16x16" if s["two_d"] else "", ":row_scaled" if s.get("row_scaled") else ""
    return "nvfp4" + tile + row_scaled + (":rht" if s["rht"] else "") + (":sr" if "seed" in s else "")


def _hadamard(s: dict) -> str:
    return "nvfp4:rht" + ("" if int(s["sign_mask"], 16) else "=unsigned")


#: Group of cases -> the spec of one of them.
SPEC_OF = {
    "current": _per_tensor,
    "delayed_cast": _per_tensor,
    "block": _block,
    "mxfp8": lambda s: "mxfp8" + _element(s) + (":32x32" if s["two_d"] else ""),
    "nvfp4": _nvfp4,
    "nvfp4_4over6": lambda s: (
        f"nvfp4{':16x16' if s['two_d'] else ''}:4over6={s['mode'].lower()}{':256' if s['e4m3_max'] == 256 else ''}"
    ),
    "nvfp4_rht": _hadamard,
    "rht_butterfly": _hadamard,
    "sr_mapping": _nvfp4,
}


class Compared(NamedTuple):
    """A tensor of a vector, beside what a device made: in bytes."""

    what: str
    size: int
    differing: int


def tensor_of(case: Case, name: str, device: torch.device | str) -> torch.Tensor:
    """What the vector stores, in the case's own dtype."""
    array = torch.from_numpy(case[name].copy())
    bits = {"bf16": torch.bfloat16, "f16": torch.float16}.get(case.spec.get("input", "bf16"))
    return (array.view(bits) if bits and array.dtype == torch.uint16 else array).to(device)


def differing_bytes(a: np.ndarray, b: np.ndarray) -> int:
    """Of arrays of the same dtype and shape; else all. NaN are equal: which one it is depends on the processor."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return a.nbytes
    if a.dtype.kind == "f":
        a, b = (np.where(np.isnan(x), x.dtype.type(np.nan), x) for x in (a, b))
    return int((np.ascontiguousarray(a).view(np.uint8) != np.ascontiguousarray(b).view(np.uint8)).sum())


def compared(case: Case, group: str, device: torch.device | str) -> Iterator[Compared]:
    """Every stored tensor and dequantized value of a case. Nothing where the vector gives random bytes instead of a
    seed."""
    if case.spec.get("sr") or case.spec["kind"] == "sr_words":
        return
    options: dict[str, Any] = {name: int(case.spec[name]) for name in ("seed", "offset") if name in case.spec}
    scale = tensor_of(case, "scale", device) if group == "delayed_cast" else None
    q = quantize(tensor_of(case, "x", device), SPEC_OF[group](case.spec), columnwise=True, scale=scale, **options)
    made = [(name, getattr(q, buffer)) for name, buffer in _BOTH + _ONE if name in case]
    made += [(name, q.dequantize(torch.float32)) for name in ("dequant", "dequant_row") if name in case]
    for name, tensor in made:
        expected = case[name]
        differing = differing_bytes(expected, tensor.cpu().numpy())
        yield Compared(f"{case.id}: {name} under {q.spec}", expected.nbytes, differing)
