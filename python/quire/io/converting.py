"""Converts checkpoints of one dialect to another: with the same codes, or an error; or quantized again on request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from quire.checks import check_type, check_type_or_none
from quire.functional import quantize
from quire.io.container import CheckpointError, some
from quire.io.dialect import Dialect, meaning
from quire.io.dialects import dialect_named
from quire.io.layout import StoredWeight
from quire.io.reading import Checkpoint, check_missing, check_scale, checked_spec, opened
from quire.io.writing import SaveReport, write_planned, written_as
from quire.loading.float_mode import subnormals_kept
from quire.tensor import QuantizedStack, QuantizedTensor
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
        dst: a folder, also for a single file: its name is model.safetensors.
        to: name of the dialect.
        filter: which entries are written, by name; None: all. With requantize all are written, and filter says which
            weights are quantized, in high precision or not; None: the layers that are quantized already. Every selected
            weight of two dimensions is quantized: a checkpoint does not say which of them are embeddings, whose
            quantized weights load() and most other readers refuse. Select linear layers only.
        exact: raise CheckpointError for a layer that converting back would not give the same bytes; False: the report
            lists what was lost, in ulps.
        requantize: a spec; the decoded values are quantized again, with another rounding. Not one that needs more than
            the values: a seed (the option `sr`) or a scale (`given`). None: never.
        missing_input_scale: as for read().
        scale: as for read().
        max_shard_size: as for write().
        overwrite: as for write().

    Returns:
        A SaveReport.

    Raises:
        CheckpointError: with nothing written, if there is no such dialect, if it has no layout for a layer, if a layer
            cannot be converted exactly and exact is True, and if dst has a checkpoint and overwrite is False.
        ValueError: for another missing_input_scale, scale or max_shard_size, for another requantize, and for a dst that
            is the name of a file of weights.
        TypeError: for arguments of a wrong type.
    """
    check_type("quire.io.convert", str | Path, src=src, dst=dst)
    check_type("quire.io.convert", str, to=to)
    check_type_or_none("quire.io.convert", Callable, filter=filter)
    options = written_as("quire.io.convert", dst, exact, max_shard_size, overwrite)
    check_missing("quire.io.convert", missing_input_scale)
    check_scale("quire.io.convert", scale)
    spec = None if requantize is None else _of_values(requantize)
    checkpoint = Checkpoint(opened(src), missing_input_scale=missing_input_scale, scale=scale)
    target = dialect_named(to)
    entries: Mapping[str, StoredWeight | torch.Tensor] = checkpoint
    if spec is not None:
        entries = Requantized(checkpoint, target, spec, filter)
    elif filter is not None:
        entries = Chosen(checkpoint, filter)
    same = checkpoint.dialect == to
    return write_planned(
        Path(dst),
        entries,
        target,
        base=dict(checkpoint.container.configs),
        unchanged={name: group.layout.name for name, group in checkpoint.groups.items()} if same else None,
        beside=checkpoint.container.folder,
        **options,
    )


def _of_values(requantize: object) -> str:
    """The canonical text of a spec by which values alone are quantized. Raises TypeError or ValueError for others."""
    what = "quire.io.convert"
    spec = checked_spec(what, "requantize", requantize)
    for option, needs in (("sr", "a seed"), ("given", "a scale from somebody")):
        if option in spec.options:
            raise ValueError(
                f"{what}: requantize={spec.text!r} needs {needs}, and there is none; leave the option {option!r} out"
            )
    return spec.text


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


#: Names of weights of embeddings, as models call them.
_EMBEDDING = re.compile(r"(^|\.)(emb|embed|embed_\w+|\w*embeddings?|wte|wpe|token_embd)\.weight$")


class Requantized(Chosen):
    """A checkpoint whose weights are quantized again. which: says by name which two-dimensional weights; None: those
    that are quantized. notes: for the report."""

    def __init__(self, checkpoint: Checkpoint, target: Dialect, spec: str, which: Callable[[str], bool] | None) -> None:
        super().__init__(checkpoint, lambda name: True)
        layouts = [one for one in target.layouts if meaning(one.spec) == meaning(spec) and not one.stacked]
        if target.layouts and not layouts:
            raise CheckpointError(f"{target.name} has no layout for {spec}", "choose another spec or dialect")
        # Prefer a layout without a static scale of inputs, because nobody has measured one.
        layouts.sort(key=lambda layout: layout.calibrated)
        self.spec = layouts[0].spec if layouts else spec
        self.origin = Origin(target.name, layouts[0].name) if layouts else Origin("", "")
        self.which = which
        named = [name for name in checkpoint.plain if _EMBEDDING.search(name) and self._is_chosen(name)]
        self.notes = [
            f"{some(named)}: the name says embedding. quire.io.load refuses a quantized embedding, as most other "
            "readers do; a filter= that does not select it keeps it in high precision"
        ] * bool(named)

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
