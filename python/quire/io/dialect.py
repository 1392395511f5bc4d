"""What quire.io knows of a tool that writes checkpoints: the protocol of a dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from quire.io.container import CheckpointError, Header
from quire.io.layout import DIV, MUL, Group, Layout, StoredWeight, read_group, write_group

#: Name of a file -> what its JSON holds.
Configs = Mapping[str, Mapping[str, Any]]


class Dialect(Protocol):
    """A way to store quantized layers. name: as in `to=` and `dialect=`. layouts: all that it reads and writes.

    detect: whether a checkpoint is of this dialect.
    groups: its quantized layers, of headers and configurations only; raises CheckpointError for what breaks a rule.
    read: one layer, of a function from a name to a tensor, which may be a meta tensor.
    bias: the bias of a layer, as read() has it, of the one of the file.
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

    def bias(self, group: Group, value: torch.Tensor) -> torch.Tensor: ...

    def choose(self, name: str, stored: StoredWeight, source: Layout | None, notes: list[str]) -> Layout: ...

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]: ...

    def layout(self, name: str) -> Layout | None: ...

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]: ...


class LayoutDialect:
    """The part of a dialect that follows from its table of layouts."""

    name: str
    layouts: Sequence[Layout]
    #: Whether quire does not write it.
    read_only = False
    #: Whether its files keep what says of a whole file how layers are stored (quire.io.unclaimed.OF_FILES).
    marks_files = False
    #: The layouts in which layers of other dialects are written; None: all.
    offered: Sequence[Layout] | None = None

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        return read_group(group, tensor, self.name, dtype)

    def bias(self, group: Group, value: torch.Tensor) -> torch.Tensor:
        return value

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        return write_group(name, stored, layout, self.name)

    def layout(self, name: str) -> Layout | None:
        return next((one for one in self.layouts if one.name == name), None)

    def choose(self, name: str, stored: StoredWeight, source: Layout | None, notes: list[str]) -> Layout:
        """Of the layouts with the same codes, the one that treats inputs most alike."""
        spec, static = stored.weight.spec_text, stored.input_scale is not None

        def inputs(layout: Layout | None) -> str:
            return "none" if layout is None else of_inputs(layout.static if static else layout.dynamic)

        def unlike(layout: Layout) -> tuple[bool, ...]:
            return of_codes(layout.spec) != of_codes(spec), inputs(layout) != inputs(source), layout.calibrated

        if self.read_only:
            raise CheckpointError(f"quire reads {self.name} and does not write it, w={spec}", _OTHER, tensor=name)
        stacked = stored.weight.dim() == 3
        offered = self.layouts if self.offered is None else self.offered
        alike = [one for one in offered if one.stacked == stacked and _fits(spec, one.spec)]
        fits = [one for one in alike if one.calibrated] if static else [one for one in alike if not one.needs_scale]
        if not fits:
            what = f"{'a stack of ' * stacked}{spec}{' with static scales of inputs' * static}, x={inputs(source)}"
            raise self._no_layout(name, what, alike)
        best = min(fits, key=unlike)
        if inputs(best) != inputs(source):
            was = described(stored)
            notes.append(f"{was} -> {self.name} {best.name}: inputs are {inputs(best)}, they were {inputs(source)}")
        return best

    def _no_layout(self, name: str, what: str, alike: Sequence[Layout]) -> CheckpointError:
        """The error for a layer. alike: layouts of its codes, which treat inputs otherwise."""
        inputs = sorted({one.static if one.needs_scale else one.dynamic for one in alike})
        if alike:
            remedy = f"it has them with x={' or x='.join(inputs)}: calibrate the model (quire.calibrate), or"
        else:
            specs = sorted({one.spec for one in self.offered or self.layouts})
            remedy = f"it has w={', w='.join(specs)}: quantize the values again, or"
        return CheckpointError(f"{self.name} has no layout for {what}", f"{remedy} {_OTHER}", tensor=name)


_OTHER = 'choose another dialect ("quire" has every spec)'
#: Options that say how scales and codes were chosen. What these mean, and where codes of rows lie, is the same.
_OF_ROUNDING = {"nan", "pow2", "sr", "rht", "rht=unsigned", "16x16", "32x32", "interleaved"}
_CHOSEN = ("eps", "4over6")


def of_codes(spec: str) -> str:
    """The spec of a weight by what its codes and scales mean, however they were chosen and global scales are stored."""
    words = [word for word in spec.split(":") if word not in _OF_ROUNDING and word.partition("=")[0] not in _CHOSEN]
    return ":".join(word for word in words if word not in (MUL, DIV, "256"))


def of_inputs(spec: str) -> str:
    """The spec of an input without what only says how scales are stored, or acts in backward."""
    others = (MUL, DIV, "given", "nan", "rht", "rht=unsigned", "interleaved")
    return ":".join(word for word in spec.split(":") if word not in others)


def described(stored: StoredWeight) -> str:
    """Where a layer is from, for messages."""
    origin = stored.origin
    return f"{origin.dialect} {origin.layout}" if origin.dialect != "quire" else f"w={stored.weight.spec_text}"


def meaning(spec: str) -> str:
    """A spec without what only says how scales are stored."""
    return ":".join(word for word in spec.split(":") if word not in (MUL, DIV, "given"))


def _fits(spec: str, wanted: str) -> bool:
    return of_codes(spec) == of_codes(wanted) or (of_codes(spec), of_codes(wanted)) == ("fp8_tensor", "fp8_row")
