"""Layers of a checkpoint that are one layer of a model: their rows one after another, every value unchanged.

Parts can have scales of their own (one for a tensor, or above the scales of blocks). A weight with a scale for each row
has them all: nothing is quantized again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quire.io.container import CheckpointError
from quire.io.layout import StoredWeight
from quire.tensor import QuantizedTensor, QuantSpec

PER_ROW = "row_scaled"


def row_spec(spec: str) -> str:
    """The spec of the same codes with a scale for each row where there is one for the tensor."""
    family, *options = spec.split(":")
    if family == "fp8_tensor":
        return ":".join(["fp8_row", *options])
    return QuantSpec(f"{spec}:{PER_ROW}").text if family == "nvfp4" and PER_ROW not in options else spec


def joined_spec(name: str, specs: Sequence[str], rows: Sequence[int], scales: Sequence[torch.Tensor | None]) -> str:
    """The spec of the joined weight. scales: of each part the one of the whole tensor, None if there is none.

    Raises CheckpointError if the parts have codes of different kinds, or tiles of 128 rows that do not end where a part
    ends."""
    if len(set(specs)) > 1:
        raise CheckpointError(
            f"the layer joins weights of {', '.join(sorted(set(specs)))}", "do not join them (fuse=)", tensor=name
        )
    spec = specs[0]
    if "128x128" in spec.split(":") and any(count % 128 for count in rows[:-1]):
        raise CheckpointError(
            f"the layer joins weights of {list(rows)} rows, and tiles of 128 rows have one scale",
            "do not join them (fuse=); a part would get the scale of another",
            tensor=name,
        )
    alike = all(scale is None or torch.equal(scale, scales[0]) for scale in scales)
    return spec if alike else row_spec(spec)


def join(parts: Sequence[QuantizedTensor], spec: str) -> QuantizedTensor:
    """One weight of the rows of all parts, under joined_spec()."""
    each = [_with_rows(part, spec).buffers() for part in parts]
    if len(each) == 1:
        return _with_rows(parts[0], spec)
    words, buffers = spec.split(":"), {}
    for name in each[0]:
        of_tensor = (
            name == "rowwise_amax" and PER_ROW not in words or name != "rowwise_data" and words[0] == "fp8_tensor"
        )
        buffers[name] = each[0][name] if of_tensor else torch.cat([one[name] for one in each])
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    return QuantizedTensor.from_buffers(buffers, spec, shape, parts[0].dtype)


def _with_rows(weight: QuantizedTensor, spec: str) -> QuantizedTensor:
    """The weight under a spec with a scale for each row."""
    if weight.spec_text == spec:
        return weight
    buffers, rows = weight.buffers(), weight.shape[0]
    key = "rowwise_scale" if weight.spec.family == "fp8_tensor" else "rowwise_amax"
    if weight.spec.family == "fp8_tensor":
        del buffers["rowwise_amax"]
    buffers[key] = buffers[key].expand(rows).contiguous()
    return QuantizedTensor.from_buffers(buffers, spec, tuple(weight.shape), weight.dtype)


def split(weight: QuantizedTensor, rows: Sequence[int], specs: Sequence[str]) -> list[QuantizedTensor]:
    """The inverse of join(): copies of that many rows, under their specs. Raises CheckpointError if the rows of a part
    have no common scale any more."""
    if sum(rows) != weight.shape[0]:
        raise CheckpointError(f"a weight of {weight.shape[0]} rows was joined of {list(rows)}", "load it again")
    starts = [sum(rows[:number]) for number in range(len(rows))]
    parts = [weight] if len(rows) == 1 else [weight[at : at + n] for at, n in zip(starts, rows, strict=True)]
    return [_with_tensor(part, spec) for part, spec in zip(parts, specs, strict=True)]


def narrowed(part: QuantizedTensor, spec: str) -> QuantizedTensor:
    """A result of split() that has new scales, under the spec that it has in the file. FP8 with different scales
    of rows stays as it is: files can have these. Raises CheckpointError for other rows without a common scale."""
    if part.spec_text == spec or row_spec(spec) != part.spec_text:
        return part
    scale = part.rowwise_scale
    if part.spec.family == "fp8_row" and not (scale.is_meta or bool((scale == scale[:1]).all())):
        return part
    return _with_tensor(part, spec)


def _with_tensor(part: QuantizedTensor, spec: str) -> QuantizedTensor:
    buffers = {name: tensor.clone() for name, tensor in part.buffers().items()}
    if part.spec_text != spec:
        key = "rowwise_scale" if spec.startswith("fp8_tensor") else "rowwise_amax"
        scale = buffers[key]
        if row_spec(spec) != part.spec_text or not torch.equal(scale, scale[:1].expand_as(scale)):
            raise CheckpointError(
                f"the layer joins several of the file, and the rows of one, w={part.spec_text}, have no common scale "
                f"any more, as w={spec} needs",
                'save with dialect="quire", or load the layers apart (without fuse=) before you train',
            )
        buffers[key] = scale[:1].clone()
        if spec.startswith("fp8_tensor"):
            buffers["rowwise_amax"] = buffers[key] * 448
    return type(part).from_buffers(buffers, spec, tuple(part.shape), part.dtype)


def joined_input(
    name: str, scales: Sequence[torch.Tensor | None], divides: bool, notes: list[str]
) -> torch.Tensor | None:
    """The static scale of the joined layer's input, [1]: that of all parts, or the one of the largest range."""
    if any(scale is None for scale in scales):
        return None
    stacked = torch.cat([scale.reshape(-1)[:1] for scale in scales])
    if bool((stacked != stacked[0]).any()):
        notes.append(
            f"{name}: parts have static scales of the input {stacked.tolist()}; the layer uses the largest range"
        )
    return (stacked.min() if divides else stacked.max()).reshape(1)


def of_one(stored: StoredWeight, index: int | None) -> StoredWeight:
    """A layer, or a matrix of a stack."""
    if index is None:
        return stored
    scale = None if stored.input_scale is None else stored.input_scale[index : index + 1]
    bias = None if stored.bias is None else stored.bias[index]
    return replace(stored, weight=stored.weight.part(index), input_scale=scale, bias=bias)


# --- the two orders of the rows of gate and up in one matrix: alternating, as in files and models of gpt-oss, or first
# all rows of the gate


def apart(rows: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Rows gate, up, gate, up along a dimension -> all of the gate, then all of up."""
    first = rows.transpose(0, dim)
    return torch.cat([first[0::2], first[1::2]]).transpose(0, dim).contiguous()


def alternating(rows: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The inverse of apart()."""
    gate, up = rows.chunk(2, dim)
    return torch.stack([gate, up], dim + 1).flatten(dim, dim + 1).contiguous()


def of_weight(move: Callable[[torch.Tensor, int], torch.Tensor], weight: QuantizedTensor) -> QuantizedTensor:
    """Applies apart() or alternating() to the rows of a weight or a stack. Only MXFP4 weights are changed: their scales
    belong to single rows, and no file has alternating rows in other formats."""
    if weight.spec.family != "mxfp4":
        return weight
    buffers = {name: move(value, weight.dim() - 2) for name, value in weight.buffers().items()}
    return type(weight).from_buffers(buffers, weight.spec_text, tuple(weight.shape), weight.dtype)
