"""Makes quantized tensors from the buffers that operators return, for modules that the classes themselves import."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from quire.loading.for_dynamo import allow_in_graph
from quire.tensor.buffers import BUFFER_NAMES, named_buffers
from quire.tensor.spec import QuantSpec

#: QuantizedTensor by False, QuantizedStack by True. The files of the classes put them here.
CLASSES: dict[bool, type[torch.Tensor]] = {}


@functools.lru_cache
def spec_of(text: str) -> QuantSpec:
    """The one QuantSpec of a canonical text."""
    return QuantSpec(text)


# Dynamo does not trace the making of a tensor without storage, so these are nodes of its graph; AOTAutograd looks into
# them and sees buffers only.
@allow_in_graph
def from_results(
    results: Sequence[torch.Tensor],
    text: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    directions: tuple[bool, bool],
    *,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """A QuantizedTensor of an operator's six results; directions (rowwise, columnwise): which of them hold something;
    scale: the one that the operator was given."""
    kept = None if scale is None else scale.detach().clone()
    return CLASSES[False](spec_of(text), shape, dtype, given_scale=kept, **named_buffers(results, *directions))


@allow_in_graph
def from_list(
    buffers: Sequence[torch.Tensor | None], text: str, shape: Sequence[int], dtype: torch.dtype, stacked: bool = False
) -> torch.Tensor:
    """A QuantizedTensor, or a QuantizedStack, of six buffers in order, None where absent."""
    return CLASSES[stacked](spec_of(text), shape, dtype, **dict(zip(BUFFER_NAMES, buffers, strict=True)))
