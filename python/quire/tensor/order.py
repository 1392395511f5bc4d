"""Which specs have bytes with the same meaning, and the two orders of codes, plain and interleaved. Both orders hold
the same numbers (numerics.md 2.4)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from quire.tensor.spec import QuantSpec

if TYPE_CHECKING:
    from quire.tensor.quantized import QuantizedTensor

_OPTION = ":interleaved"  # the last one of a canonical text
#: Options that say how codes and scales are chosen, and not what they mean.
_CHOICE = ("eps", "4over6", "sr", "given", "nan")
#: Options that promise more of scales whose bytes mean the same without them: powers of two, or one value for a square.
_PROMISES = frozenset({"pow2", "32x32", "16x16"})


def in_order(spec: str, interleaved: bool) -> str:
    """The canonical text of a spec with that order."""
    plain = spec.removesuffix(_OPTION)
    return plain + _OPTION if interleaved else plain


def same_codes(spec: str, other: str) -> bool:
    """Whether codes mean the same under both specs. The specs may differ in the order of codes, and in `nan`, which
    only says how values that are not finite are quantized."""
    return spec == other or _meaning(spec) == _meaning(other)


def _meaning(spec: str) -> list[str]:
    return [word for word in spec.split(":") if word not in ("nan", "interleaved")]


def kept_directions(spec: QuantSpec, source: QuantizedTensor) -> list[str]:
    """The directions whose bytes a tensor of that spec can take over from `source`. If there are any, a copy does not
    round."""
    each = ("rowwise", "columnwise")
    return [direction for direction in each if source.stores(direction) and _holds(spec, source.spec, direction)]


@functools.lru_cache
def _holds(spec: QuantSpec, other: QuantSpec, direction: str) -> bool:
    """Whether the bytes of a direction of a tensor of spec `other` decode to the same values under `spec`, and keep
    what `spec` promises of scales. The order of codes may differ."""
    own, theirs = _stored(spec, direction), _stored(other, direction)
    if direction == "columnwise" and _is_tied(spec) and not _is_tied(other):
        return False
    return own <= theirs and theirs - own <= _PROMISES


def _stored(spec: QuantSpec, direction: str) -> set[str]:
    """The family, and the options that the bytes of a direction depend on."""
    options = {option for option in spec.options if option.split("=")[0] not in (*_CHOICE, "interleaved")}
    if direction == "rowwise":
        options = {option for option in options if option.split("=")[0] != "rht"}  # which changes only columnwise codes
    if any(option.startswith("global") for option in options):
        options.discard("256")  # a factor of values only where the amax is one (numerics.md 5.11)
    return options | {spec.family}


def _is_tied(spec: QuantSpec) -> bool:
    """Whether the columnwise codes follow from the rowwise ones, as in square tiles. Under 4over6 they do not: it
    decides for each direction (5.8)."""
    return "16x16" in spec.options and not any(option.startswith("4over6") for option in spec.options)


def is_interleaved(spec: str) -> bool:
    return spec.endswith(_OPTION)


def reordered(q: QuantizedTensor, interleaved: bool) -> QuantizedTensor:
    """q with its codes in that order: q itself, or a tensor with new codes and scales and the same amaxes and master.
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
