"""The two orders in which codes lie, plain and interleaved: the same numbers in either (numerics.md 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.tensor.spec import QuantSpec

if TYPE_CHECKING:
    from quire.tensor.quantized import QuantizedTensor

_OPTION = ":interleaved"  # the last one of a canonical text


def in_order(spec: str, interleaved: bool) -> str:
    """The canonical text of a spec with that order."""
    plain = spec.removesuffix(_OPTION)
    return plain + _OPTION if interleaved else plain


def same_codes(spec: str, other: str) -> bool:
    """Whether codes of both specs mean the same: they differ in order, or in what `nan` makes of values that are not
    finite, or not at all."""
    return spec == other or _meaning(spec) == _meaning(other)


def _meaning(spec: str) -> list[str]:
    return [word for word in spec.split(":") if word not in ("nan", "interleaved")]


def is_interleaved(spec: str) -> bool:
    return spec.endswith(_OPTION)


def reordered(q: QuantizedTensor, interleaved: bool) -> QuantizedTensor:
    """q with its codes in that order: itself, or a tensor of new codes and scales, of the same amaxes and master.
    Raises RuntimeError for swizzled scales, which have an order of their own."""
    if is_interleaved(q.spec_text) == interleaved:
        return q
    if q.stacked:
        return q.of([reordered(part, interleaved) for part in q.parts()]).remember_like(q)
    named = q.named()
    for direction in ("rowwise", "columnwise"):
        data, scale, amax = (named[f"{direction}_{kind}"] for kind in ("data", "scale", "amax"))
        if data is None:
            continue
        given = (data, scale, torch.empty(0, dtype=torch.float32, device=data.device) if amax is None else amax)
        columnwise = direction == "columnwise"
        data, scale = torch.ops.quire.reorder(*given, q.spec_text, columnwise, q.shape)
        named[f"{direction}_data"], named[f"{direction}_scale"] = data, scale
    return q.with_buffers(named, spec=QuantSpec(in_order(q.spec_text, interleaved))).remember_like(q)
