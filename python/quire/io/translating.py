"""A layer of one dialect in the layout of another: the same codes, and scales that mean the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.io.dialect import Dialect, described
from quire.io.dialects import DIALECTS
from quire.io.layout import DIV, MUL, WITHOUT_VALUES, Layout, StoredWeight
from quire.tensor import QuantSpec


@dataclass(frozen=True)
class Loss:
    """What a layer lost. ulp: the largest difference of a scale that is converted back, in units in the last place of
    float32; 0 for a tensor that is left out."""

    tensor: str
    what: str
    ulp: int

    def __str__(self) -> str:
        return f"{self.tensor}: {self.what}"


def chosen_layout(name: str, stored: StoredWeight, dialect: Dialect, notes: list[str]) -> Layout:
    """The layout in which a dialect stores a layer: the one it was read from, or Dialect.choose()."""
    source = source_layout(stored)
    if source is not None and stored.origin.dialect == dialect.name:
        return source
    layout = dialect.choose(name, stored, source, notes)
    if source is not None and source.alternating and not layout.alternating:
        notes.append(
            f"{described(stored)} -> {dialect.name} {layout.name}: rows of gate and up are in turn in the one. In the "
            "other all rows of the gate come first, as in quire.MoE, but not in transformers"
        )
    return layout


def source_layout(stored: StoredWeight) -> Layout | None:
    """The layout that a layer was read from; None if it is of no dialect's table."""
    dialect = next((one for one in DIALECTS if one.name == stored.origin.dialect), None)
    return None if dialect is None else dialect.layout(stored.origin.layout)


def translated(name: str, stored: StoredWeight, layout: Layout, dialect: str) -> tuple[StoredWeight, list[Loss]]:
    """The layer with the scales of a layout, and what converting it back would not give."""
    if (stored.origin.dialect, stored.origin.layout) == (dialect, layout.name):
        return stored, []
    source = source_layout(stored)
    kept = [stored.origin.names[role] for role in stored.origin.verbatim if role not in WITHOUT_VALUES]
    losses = [Loss(name, f"{tensor} has no place there", 0) for tensor in kept]
    weight, input_scale = stored.weight, stored.input_scale
    if weight.spec_text != (wanted := QuantSpec(layout.spec)).text:
        buffers = weight.buffers()
        if wanted.family == "nvfp4":
            ways = _way(weight.spec_text), _way(layout.spec)
            amax = buffers["rowwise_amax"]
            buffers["rowwise_amax"], lost = rescaled(name, "the global scale", amax, ways, _largest(weight.spec_text))
            losses += lost
        elif wanted.family == "fp8_row" and weight.spec.family == "fp8_tensor":
            del buffers["rowwise_amax"]
            scale = buffers["rowwise_scale"]
            buffers["rowwise_scale"] = scale.expand(*weight.shape[:-1]).contiguous()
        weight = type(weight).from_buffers(buffers, wanted, tuple(weight.shape), weight.dtype)
    if input_scale is not None and source is not None:
        ways = _way(source.static), _way(layout.static)
        largest = _largest(source.static)
        input_scale, lost = rescaled(name, "the scale of the input", input_scale, ways, largest)
        losses += lost
    return replace(stored, weight=weight, input_scale=input_scale), losses


#: How a spec without the option `global` has the scale above those of NVFP4's blocks.
_AMAX = "amax"


def _way(spec: str) -> str:
    """What the scale above the scales of blocks is: a factor, a divisor or an amax."""
    words = spec.split(":")
    return DIV if DIV in words else _AMAX if words[0] == "nvfp4" and MUL not in words else MUL


def _largest(spec: str) -> int:
    """What an NVFP4 amax is divided by (numerics.md 5.8)."""
    return 6 * (256 if "256" in spec.split(":") else 448)


def rescaled(
    name: str, what: str, scale: torch.Tensor, ways: tuple[str, str], largest: int
) -> tuple[torch.Tensor, list[Loss]]:
    """A scale that is stored in the first way, in the second, and what that loses. largest: the amax of a factor 1."""
    own, wanted = ways
    if own == wanted:
        return scale, []
    if own != _AMAX:
        return inverted(name, what, scale)
    # A value is code * (S * amax) / largest there and code * (S * factor) here, each rounded in its own way.
    all_of_it = torch.full_like(scale, largest)  # PyTorch would round a number's quotient twice
    factor = torch.where(scale == 0, 1.0, scale / all_of_it if wanted == MUL else all_of_it / scale)
    kind = "factor" if wanted == MUL else "divisor"
    text = (
        f"{what} is stored as an amax. The dialect stores a {kind}, with which values are rounded differently; a "
        f"weight quantized as nvfp4:{wanted} has such a {kind}"
    )
    return factor, [Loss(name, text, 1)]


def inverted(name: str, what: str, scale: torch.Tensor) -> tuple[torch.Tensor, list[Loss]]:
    """1 / scale, and whether inverting that gives scale."""
    found = scale.reciprocal()
    if scale.is_meta:
        return found, []
    back = found.reciprocal()
    ulp = int((back.view(torch.int32).long() - scale.view(torch.int32).long()).abs().max())
    if ulp == 0:
        return found, []
    worst = scale[back != scale].reshape(-1)[0].item()
    return found, [Loss(name, f"{what} {worst!r} is stored inverted, and inverting it again is {ulp} ulp off", ulp)]
