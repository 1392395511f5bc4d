"""What quire.io knows of a tool that writes checkpoints: the protocol of a dialect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from quire.io.container import Header
from quire.io.errors import CheckpointError, some
from quire.io.layout import Group, Layout, read_group, write_group
from quire.io.stored import StoredWeight

#: Name of a file -> what its JSON holds.
Configs = Mapping[str, Mapping[str, Any]]
#: What only a quantized layer has.
OF_LAYERS = re.compile(
    r"(weight|input|activation|pre_quant|proj)_(global_)?scale(_2|_inv)?$|_scales$|_blocks$|_scale_inv$|_packed$|"
    r"_zero_point$|_qdata$|svdquant_lora_[ab]$|_g_idx$|\.(qweight|qzeros|scales|g_idx|quant_state.*)$"
)
#: Scales of caches of keys and values, which are not of a layer and are copied as they are.
OF_CACHES = re.compile(r"(^|[._])(k|v|q|kv|kv_cache|p|prob)_(scale|bias|zero_point)$")


class Dialect(Protocol):
    """A way to store quantized layers. name: as in `to=` and `dialect=`. layouts: all that it reads and writes.

    detect: whether a checkpoint is of this dialect. groups: its quantized layers, of headers and configurations only;
    raises CheckpointError for what breaks a rule. read: one layer, of a function from a name to a tensor, which may be
    a meta tensor. write: the tensors of one layer by name. config: the configurations that say what `layers` (name of
    the weight -> layout) are, based on those of the model.
    """

    name: str
    layouts: Sequence[Layout]

    def detect(self, header: Header, configs: Configs) -> bool: ...

    def groups(self, header: Header, configs: Configs) -> list[Group]: ...

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight: ...

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]: ...

    def config(self, layers: Mapping[str, Layout], plain: Sequence[str], base: Configs) -> dict[str, Any]: ...


class LayoutDialect:
    """The part of a dialect that follows from its table of layouts."""

    name: str
    layouts: Sequence[Layout]

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        return read_group(group, tensor, self.name, dtype)

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        return write_group(name, stored, layout, self.name)

    def layout(self, name: str) -> Layout:
        """The layout of that name. Raises CheckpointError, which lists all."""
        found = next((one for one in self.layouts if one.name == name), None)
        if found is None:
            known = ", ".join(one.name for one in self.layouts)
            raise CheckpointError(f"{self.name} has no layout {name!r}; it has {known}", "choose one of these")
        return found


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
