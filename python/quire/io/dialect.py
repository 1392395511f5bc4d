"""What quire.io knows of a tool that writes checkpoints: the protocol of a dialect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from quire.io.container import Header
from quire.io.errors import CheckpointError, some
from quire.io.layout import DIV, MUL, Group, Layout, read_group, write_group
from quire.io.stored import StoredWeight

#: Name of a file -> what its JSON holds.
Configs = Mapping[str, Mapping[str, Any]]
#: What only a quantized layer has.
OF_LAYERS = re.compile(
    r"(weight|input|activation|pre_quant|proj)_(global_)?scale(_2|_inv)?$|_scales$|_blocks$|_scale_inv$|_packed$|"
    r"_zero_point$|_qdata$|svdquant_lora_[ab]$|_g_idx$|\.(qweight|qzeros|scales|g_idx|quant_state.*)$"
)
#: Scales of caches of keys and values, which are not of a layer and are copied as they are.
OF_CACHES = re.compile(r"(^|[._])(k|v|q|kv|kv_cache|p|prob)_(scale|bias|zero_point)$|[kv]_proj\.output_scale$")


class Dialect(Protocol):
    """A way to store quantized layers. name: as in `to=` and `dialect=`. layouts: all that it reads and writes.

    detect: whether a checkpoint is of this dialect.
    groups: its quantized layers, of headers and configurations only; raises CheckpointError for what breaks a rule.
    read: one layer, of a function from a name to a tensor, which may be a meta tensor.
    choose: the layout for a layer of another dialect, where it had the layout `source`; adds to notes what a layout
        does otherwise; raises CheckpointError if there is none.
    write: the tensors of one layer by name.
    layout: the one of that name, None if there is none.
    config: the configurations that say what `groups` are, based on those of the model; plain: names of modules that
        are not quantized.
    """

    name: str
    layouts: Sequence[Layout]

    def detect(self, header: Header, configs: Configs) -> bool: ...

    def groups(self, header: Header, configs: Configs) -> list[Group]: ...

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight: ...

    def choose(self, name: str, stored: StoredWeight, source: Layout | None, notes: list[str]) -> Layout: ...

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]: ...

    def layout(self, name: str) -> Layout | None: ...

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]: ...


class LayoutDialect:
    """The part of a dialect that follows from its table of layouts."""

    name: str
    layouts: Sequence[Layout]

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        return read_group(group, tensor, self.name, dtype)

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        return write_group(name, stored, layout, self.name)

    def layout(self, name: str) -> Layout | None:
        return next((one for one in self.layouts if one.name == name), None)

    def choose(self, name: str, stored: StoredWeight, source: Layout | None, notes: list[str]) -> Layout:
        """Of the layouts with the same codes, the one that treats inputs most alike."""
        spec, stacked, static = stored.weight.spec_text, stored.weight.dim() == 3, stored.input_scale is not None
        fits = [one for one in self.layouts if one.stacked == stacked and _fits(spec, one.spec)]
        fits = [one for one in fits if one.calibrated] if static else fits
        was = stored.origin.dialect, stored.origin.layout
        if not fits:
            what = f"{'a stack of ' if stacked else ''}{spec}{' with static scales of inputs' if static else ''}"
            raise CheckpointError(
                f"{self.name} has no layout for {what}, as {' '.join(was)} is",
                "convert to another dialect, or quantize the values again (requantize=, --requantize)",
                tensor=name,
            )

        def inputs(layout: Layout | None) -> str:
            return "none" if layout is None else meaning(layout.static if static else layout.dynamic)

        def unlike(layout: Layout) -> tuple[bool, ...]:
            return meaning(layout.spec) != meaning(spec), inputs(layout) != inputs(source), layout.calibrated != static

        best = min(fits, key=unlike)
        if inputs(best) != inputs(source):
            notes.append(
                f"{' '.join(was)} -> {self.name} {best.name}: inputs are {inputs(best)}, they were {inputs(source)}"
            )
        return best


def meaning(spec: str) -> str:
    """A spec without what only says how scales are stored."""
    return ":".join(word for word in spec.split(":") if word not in (MUL, DIV, "given"))


def _fits(spec: str, wanted: str) -> bool:
    return meaning(spec) == meaning(wanted) or (meaning(spec), meaning(wanted)) == ("fp8_tensor", "fp8_row")


def check_consumed(groups: Sequence[Group], header: Header) -> None:
    """Raises CheckpointError if a tensor that only a quantized layer has belongs to none."""
    consumed = {name for group in groups for name in group.names.values()}
    left = [name for name in header if name not in consumed and OF_LAYERS.search(name) and not OF_CACHES.search(name)]
    if left:
        raise CheckpointError(
            f"the tensor belongs to no quantized layer ({len(left)} such tensors: {some(left)})",
            "its weight is missing, or the layer is stored in a way that quire does not read",
            file=header[left[0]].file,
            tensor=left[0],
        )
