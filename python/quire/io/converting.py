"""Converts checkpoints of one dialect to another: with the same codes, or an error; or quantized again on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from quire.checks import check_type
from quire.functional import quantize
from quire.io.container import CheckpointError
from quire.io.dialect import Dialect, meaning
from quire.io.dialects import dialect_named
from quire.io.layout import StoredWeight
from quire.io.reading import Checkpoint, check_missing, check_scale, opened
from quire.io.writing import SaveReport, write_planned
from quire.loading.float_mode import subnormals_kept
from quire.tensor import QuantizedStack, QuantizedTensor, QuantSpec
from quire.tensor.origin import Origin


@subnormals_kept()
def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str,
    filter: Callable[[str], bool] | None = None,
    exact: bool = True,
    requantize: str | None = None,
    missing_input_scale: str = "raise",
    scale: float | None = None,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
) -> SaveReport:
    """Writes a checkpoint as another dialect, one layer at a time. Small files beside the weights are copied.

    Args:
        src: as for read().
        dst: a folder.
        to: name of the dialect.
        filter: which entries are written, by name; None: all. With requantize all are written, and filter says which
            weights are quantized, in high precision or not; None: the layers that are quantized already.
        exact: raise CheckpointError for a layer that converting back would not give the same bytes; False: the report
            lists what was lost, in ulps.
        requantize: a spec; the decoded values are quantized again, with another rounding. None: never.
        missing_input_scale: as for read().
        scale: as for read().
        max_shard_size: as for write().
        overwrite: as for write().

    Returns:
        A SaveReport.

    Raises:
        CheckpointError: with nothing written, if there is no such dialect, if it has no layout for a layer, if a layer
            cannot be converted exactly and exact is True, and if dst exists.
        ValueError: for another missing_input_scale, scale or max_shard_size, and for a requantize that is no spec.
    """
    check_type("quire.io.convert", str, to=to)
    check_missing("quire.io.convert", missing_input_scale)
    check_scale("quire.io.convert", scale)
    checkpoint = Checkpoint(opened(src), missing_input_scale=missing_input_scale, scale=scale)
    target = dialect_named(to)
    entries: Mapping[str, StoredWeight | torch.Tensor] = checkpoint
    if requantize is not None:
        entries = Requantized(checkpoint, target, requantize, filter)
    elif filter is not None:
        entries = Chosen(checkpoint, filter)
    same = checkpoint.dialect == to
    return write_planned(
        Path(dst),
        entries,
        target,
        base=dict(checkpoint.container.configs),
        unchanged={name: group.layout.name for name, group in checkpoint.groups.items()} if same else None,
        exact=exact,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        beside=checkpoint.container.folder,
    )


class Chosen(Mapping[str, StoredWeight | torch.Tensor]):
    """Some entries of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, chosen: Callable[[str], bool]) -> None:
        self.checkpoint = checkpoint
        self.names = [name for name in checkpoint if chosen(name)]

    def __getitem__(self, name: str) -> StoredWeight | torch.Tensor:
        return self.checkpoint[name]

    def outline(self, name: str) -> StoredWeight | torch.Tensor:
        """As Checkpoint.outline()."""
        return self.checkpoint.outline(name)

    @property
    def metadata(self) -> dict[str, str]:
        """Texts of the headers."""
        return self.checkpoint.metadata

    def __contains__(self, name: object) -> bool:
        return name in self.names  # Mapping's would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Requantized(Chosen):
    """A checkpoint whose weights are quantized again. which: says by name which two-dimensional weights; None: those
    that are quantized."""

    def __init__(self, checkpoint: Checkpoint, target: Dialect, spec: str, which: Callable[[str], bool] | None) -> None:
        super().__init__(checkpoint, lambda name: True)
        wanted = QuantSpec(spec).text
        layouts = [one for one in target.layouts if meaning(one.spec) == meaning(wanted) and not one.stacked]
        if target.layouts and not layouts:
            raise CheckpointError(f"{target.name} has no layout for {wanted}", "choose another spec or dialect")
        # Prefer a layout without a static scale of inputs, because nobody has measured one.
        layouts.sort(key=lambda layout: layout.calibrated)
        self.spec = layouts[0].spec if layouts else wanted
        self.origin = Origin(target.name, layouts[0].name) if layouts else Origin("", "")
        self.which = which

    def _is_chosen(self, name: str) -> bool:
        if self.which is not None:
            entry = self.checkpoint.plain.get(name)
            is_weight = entry is None or (len(entry.shape) == 2 and entry.dtype.is_floating_point)
            return is_weight and self.which(name)
        return name in self.checkpoint.groups

    def __getitem__(self, name: str) -> StoredWeight | torch.Tensor:
        value = self.checkpoint[name]
        if not self._is_chosen(name):
            return value
        bias = value.bias if isinstance(value, StoredWeight) else None
        values = value.dequantize(torch.float32) if isinstance(value, StoredWeight) else value.float()
        return StoredWeight(self._quantized(values), None, bias, self.origin)

    def outline(self, name: str) -> StoredWeight | torch.Tensor:
        """As Checkpoint.outline()."""
        value = self.checkpoint.outline(name)
        if not self._is_chosen(name):
            return value
        shape = tuple(value.shape)
        empty = torch.empty(shape, dtype=torch.float32, device="meta")
        bias = value.bias if isinstance(value, StoredWeight) else None
        return StoredWeight(self._quantized(empty), None, bias, self.origin)

    def _quantized(self, values: torch.Tensor) -> QuantizedTensor:
        stacked = values.dim() == 3
        each = [quantize(one, self.spec) for one in (values if stacked else [values])]
        return (QuantizedStack.of(each) if stacked else each[0]).to(self.checkpoint.dtype)
