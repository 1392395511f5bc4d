"""Views of a quantized tensor. These keep its codes: consecutive whole rows with any leading sizes, whole matrices of a
stack, and any part of a tensor with one scale. All other views are read as decoded values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from quire.tensor.buffers import at_least_one
from quire.tensor.decoded import DecodedView, Window

aten = torch.ops.aten

if TYPE_CHECKING:
    from quire.tensor.quantized import QuantizedTensor
    from quire.tensor.stack import QuantizedStack

#: Rows that share scales, or lie in one tile, by option of a spec.
TILES = {"128x128": 128, "32x32": 32, "16x16": 16, "swizzled": 128, "interleaved": 16}
#: Views that cut a tensor along one dimension. PyTorch's other operators that do so call these.
_CUTS = (aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind)


def view(q: QuantizedTensor, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a view operator on q, which shares q's storage: a QuantizedTensor if its codes are codes of q, else
    a DecodedView.

    PyTorch computes the geometry, on a tensor without values: all views of whole rows are then one case.
    """
    outline = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="meta")
    found = operator(outline, *args[1:], **kwargs)
    of = _matrices if q.stacked else _rows
    each = [found] if isinstance(found, torch.Tensor) else list(found)
    results = [of(q, part) for part in each]
    decoded = any([result is None for result in results])
    if decoded and (parts := _under_one_scale(q, operator, args, kwargs)) is not None:
        results, decoded = parts, False
    if decoded or any([result.is_part for result in results]):
        for i, window in enumerate(_windows(q, operator, args, kwargs, each)):
            if decoded:
                results[i] = DecodedView(window)
            else:
                results[i].window = window
    return results[0] if isinstance(found, torch.Tensor) else type(found)(results)


def _windows(
    q: QuantizedTensor, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[torch.Tensor]
) -> list[Window]:
    """Where the results of the operator lie; found: as views of q."""
    # PyTorch counts the offset of as_strided from the beginning of memory, which is not where a part of q begins. Such
    # a view of a part is read only.
    if q.window is None or operator.name().startswith("aten::as_strided"):
        return [Window.like(q, outline) for outline in found]
    return _within(q.window, operator, args, kwargs)[1]


def view_of_view(of: DecodedView, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a view operator on a DecodedView."""
    found, windows = _within(of.window, operator, args, kwargs)
    results = [DecodedView(window) for window in windows]
    return results[0] if isinstance(found, torch.Tensor) else type(found)(results)


def _within(window: Window, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Window]]:
    found = operator(window.outline(), *args[1:], **kwargs)
    each = [found] if isinstance(found, torch.Tensor) else list(found)
    return found, [Window.like(window.base, outline) for outline in each]


def _rows(q: QuantizedTensor, outline: torch.Tensor) -> QuantizedTensor | None:
    cols = at_least_one(q.shape)[-1]
    if outline.dtype != q.dtype or at_least_one(outline.shape)[-1] != cols or not outline.is_contiguous():
        return None
    if q.is_part and not q.rowwise_data.is_contiguous():
        return None
    rows, count = math.prod(q.shape[:-1]), math.prod(outline.shape[:-1])
    if count == rows and outline.storage_offset() == 0:
        return _reshaped(q, outline.shape)
    if cols == 0 or count == 0 or outline.storage_offset() % cols != 0:
        return None
    return _part(q, outline.shape, outline.storage_offset() // cols, count)


def _under_one_scale(
    q: QuantizedTensor, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[QuantizedTensor] | None:
    """Parts that are not whole rows, such as columns, of a tensor with one scale. Their codes have strides."""
    data = q.rowwise_data
    if q.spec.family != "fp8_tensor" or q.stacked or data is None or data.shape != q.shape:
        return None
    if operator.overloadpacket not in _CUTS or "interleaved" in q.spec.options:
        return None
    codes = operator(data, *args[1:], **kwargs)
    parts = [codes] if isinstance(codes, torch.Tensor) else list(codes)
    if any([part.dim() == 0 or part.numel() == 0 for part in parts]):
        return None
    named = dict.fromkeys(q.named()) | {"rowwise_scale": q.rowwise_scale, "rowwise_amax": q.rowwise_amax}
    return [
        q.with_buffers({**named, "rowwise_data": part}, shape=part.shape, strides=part.stride(), is_part=True)
        for part in parts
    ]


def _matrices(q: QuantizedStack, outline: torch.Tensor) -> QuantizedTensor | None:
    """One matrix of a stack, or consecutive ones as a stack."""
    matrix, size = q.shape[1:], math.prod(q.shape[1:])
    if outline.dtype != q.dtype or outline.shape[-2:] != matrix or not outline.is_contiguous() or outline.numel() == 0:
        return None
    first, outside = divmod(outline.storage_offset(), size)
    if outside or outline.dim() > 3:
        return None
    if outline.dim() == 2:
        return q.part(first)
    named = {name: None if t is None else t.narrow(0, first, len(outline)) for name, t in q.named().items()}
    return q.with_buffers(named, shape=outline.shape)


def _reshaped(q: QuantizedTensor, shape: torch.Size) -> QuantizedTensor:
    """The same matrix with other leading sizes. Only buffers that have the shape of the tensor change their shape."""
    named = q.named()
    shaped = ["rowwise_data", *(["columnwise_data"] if q.spec.family == "mxfp8" else [])]
    for name in ("master", *([] if "interleaved" in q.spec.options else shaped)):
        if named[name] is not None:
            named[name] = named[name].view(*shape[:-1], named[name].shape[-1])
    return q.with_buffers(named, shape=shape)


def _part(q: QuantizedTensor, shape: torch.Size, first: int, count: int) -> QuantizedTensor | None:
    """Rows [first, first + count) by their rowwise codes."""
    rows = math.prod(q.shape[:-1])
    tile = max([TILES.get(option, 1) for option in q.spec.options], default=1)
    whole_tiles = first % tile == 0 and (count % tile == 0 or first + count == rows)
    if q.rowwise_data is None or not whole_tiles:
        return None
    buffers = dict.fromkeys(q.named())
    if "interleaved" in q.spec.options:
        buffers["rowwise_data"] = q.rowwise_data.narrow(0, first, -(-count // 16) * 16)
    else:
        data = q.rowwise_data.reshape(rows, -1).narrow(0, first, count)
        buffers["rowwise_data"] = data.view(*shape[:-1], data.shape[-1])
    buffers["rowwise_scale"] = _scale(q, first, count)
    if q.rowwise_amax is not None:
        per_row = "row_scaled" in q.spec.options
        buffers["rowwise_amax"] = q.rowwise_amax.narrow(0, first, count) if per_row else q.rowwise_amax
    return q.with_buffers(buffers, shape=shape, is_part=True)


def _scale(q: QuantizedTensor, first: int, count: int) -> torch.Tensor:
    scale, options = q.rowwise_scale, q.spec.options
    if q.spec.family == "fp8_tensor":
        return scale
    if "128x128" in options:
        return scale.narrow(0, first // 128, -(-count // 128))
    if q.spec.family == "fp8_block":  # blocks come first (numerics.md 3.3)
        return scale.narrow(1, first, count)
    tile = 128 if "swizzled" in options else 16 if "interleaved" in options and scale.dim() == 2 else 1
    return scale.narrow(0, first, -(-count // tile) * tile)
