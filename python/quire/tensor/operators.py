"""What PyTorch's operators do with a QuantizedTensor or a view of it: keep the codes, change them in place, or compute
on values.

Views that keep the codes are consecutive whole rows with any leading sizes, whole matrices of a stack, and any part of
a tensor with one scale. All other views are read as values.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from quire.loading.devices import has_values
from quire.tensor.buffers import DTYPES, at_least_one
from quire.tensor.decoded import DecodedView, Window, each
from quire.tensor.quantized import QuantizedTensor
from quire.tensor.spec import TILES
from quire.tensor.values import Values, is_matmul
from quire.tensor.writes import undeclared_writes, write, write_undeclared, written_arguments

if TYPE_CHECKING:
    from quire.tensor.stack import QuantizedStack

aten = torch.ops.aten
P = ParamSpec("P")
R = TypeVar("R")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator that was given at least one QuantizedTensor or DecodedView."""
    if operator.namespace == "quire":
        _refuse_codes(operator, args, kwargs)
    if args and isinstance(args[0], QuantizedTensor | DecodedView):
        of_inference = args[0].is_inference()
        if operator.is_view and (of_inference or torch.is_inference_mode_enabled()):
            # A view counts writes with the tensor that it is a view of, where that one counts them.
            with torch.inference_mode(of_inference):
                # Functions of several operators, such as reshape, come as they are; some copy where there is no view.
                result = operator.decompose(*args, **kwargs)
                if result is NotImplemented:
                    result = _of_codes(operator, args, kwargs)
        else:
            result = _of_codes(operator, args, kwargs)
        if result is not NotImplemented:
            return result
    if names := undeclared_writes(operator):
        return write_undeclared(operator, names, args, kwargs)
    if written := written_arguments(operator):
        return write(operator, written, args, kwargs)
    return _on_values(operator, args, kwargs)


def _of_codes(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of the first argument, or a result that consists of its codes; NotImplemented if neither."""
    if isinstance(args[0], DecodedView):
        return view_of_view(args[0], operator, args, kwargs) if operator.is_view else NotImplemented
    if handler := _KEEPS_CODES.get(operator):
        return handler(operator, args, kwargs)
    return view(args[0], operator, args, kwargs) if operator.is_view else NotImplemented


def _on_values(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    of_codes = is_matmul(operator)
    of_matmul = of_codes or operator is aten.t.default  # which F.linear calls for its weight
    if of_matmul and not _CALLER.is_layer and torch._C._current_graph_task_id() == -1:
        _tell_decoding()  # not in backward: the forward pass has, unless a layer made it
    values = Values(of_codes=of_codes)
    with torch.no_grad():  # gradients pass through the arguments, which autograd knows
        args = each(values.to_read, args)
        kwargs = {name: each(values.to_read, value) for name, value in kwargs.items()}
    return each(values.apart_from_masters, operator(*args, **kwargs))


def _refuse_codes(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises TypeError for a QuantizedTensor: quire's operators take plain tensors. A DecodedView has only values."""

    def check(value: Any) -> None:
        if isinstance(value, QuantizedTensor):
            raise TypeError(
                f"{operator} was given a QuantizedTensor; it takes plain tensors, and decoding one here would hide a "
                "loss of speed and accuracy. Pass its buffers (buffer_list()), its carrier(), or dequantize(). Within "
                "torch.func.grad a layer does not see the codes of a quantized weight: take its gradient by "
                "backward(), or call quire.dequantize_weights(model) first"
            )

    each(check, [*args, *kwargs.values()])


class _Caller(threading.local):
    """Of PyTorch's operators. is_layer: a layer of quire, which warns itself."""

    def __init__(self) -> None:
        self.is_layer = False


_CALLER = _Caller()


def called_by_layer(function: Callable[P, R]) -> Callable[P, R]:
    """The function of a layer of quire, in which no matmul of PyTorch warns that it decodes a weight."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before, _CALLER.is_layer = _CALLER.is_layer, True
        try:
            return function(*args, **kwargs)
        finally:
            _CALLER.is_layer = before

    return call


@functools.cache
def _tell_decoding() -> None:
    """Warns once."""
    warnings.warn(
        "QuantizedTensor: a matmul of PyTorch, such as that of a torch.nn.Linear with a quantized weight, decodes the "
        "weight in every call and does not quantize x. To use the codes, convert the layer: quire.convert(model, "
        "recipe, for_inference=True, tokens=None, min_features=1)",
        stacklevel=2,
    )


# --- results that consist of the same codes


def _to_each_buffer(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    q = args[0]
    named = q.named()
    results = {name: None if t is None else operator(t, *args[1:], **kwargs) for name, t in named.items()}
    alias = operator.is_view
    result = q.with_buffers(results, is_part=q.is_part and alias)  # a copy shares its scales with no other tensor
    return result.remember_like(q, alias=alias).lies_like(q if alias else None)


def _detach(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    """A tensor with the same buffer objects, which have no gradient. Tracers need the tensors that the operator
    returned."""
    q = args[0]
    named = q.named()
    if all([type(t) is torch.Tensor for t in named.values() if t is not None]):
        return q.with_buffers(named).remember_like(q, alias=True).lies_like(q)
    return _to_each_buffer(operator, args, kwargs)


def _to_copy(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another nominal dtype, and a copy of the buffers on another device."""
    q, dtype = args[0], kwargs.get("dtype")
    if dtype not in (None, *DTYPES):
        return NotImplemented
    options = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
    results = {name: None if t is None else operator(t, **options) for name, t in q.named().items()}
    return q.with_buffers(results, dtype=dtype, is_part=False).remember_like(q)


def _empty_like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    q, dtype = args[0], kwargs.get("dtype")
    if dtype not in (None, *DTYPES):
        return _plain_like(operator, args, kwargs)
    device = kwargs.get("device")
    results = {name: None if t is None else torch.zeros_like(t, device=device) for name, t in q.named().items()}
    if q.given_scale is not None:  # a scale of zeros would be none
        lost = q.is_meta and has_values(results["given_scale"].device)
        results["given_scale"] = None if lost else q.given_scale.to(results["given_scale"].device, copy=True)
    return q.with_buffers(results, dtype=dtype, is_part=False)


def _new_empty(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """For the tensor's own shape this is empty_like, because PyTorch's checkpoint stagers copy the tensor into it."""
    q, size = args[0], tuple(args[1])
    contiguous = len(args) < 3 or tuple(args[2]) == q.stride()
    return (_empty_like if size == tuple(q.shape) and contiguous else _plain_like)(operator, args, kwargs)


def _zeros_like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Plain zeros, for the states of optimizers. torch.distributed's _create_cpu_state_dict also asks for them, to copy
    a state dict into them before it is saved (BlockingAsyncStager): it gets a tensor that takes codes."""
    frame = sys._getframe()
    for _ in range(6):  # this function, run, __torch_dispatch__, PyTorch's __torch_function__, the caller
        frame = frame.f_back
        if frame is None or frame.f_globals.get("__name__") == "torch.distributed._state_dict_utils":
            break
    else:
        frame = None
    return (_plain_like if frame is None else _empty_like)(operator, args, kwargs)


def _plain_like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A plain tensor. Operators such as zeros_like read only shape, dtype and device."""
    q = args[0]
    outline = torch.empty(q.shape, dtype=q.dtype, device="meta")
    device = q.device if kwargs.get("device") is None else kwargs["device"]
    return operator(outline, *args[1:], **{**kwargs, "device": device})


def _new_zeros(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Plain zeros. Refuses the shape of only some rows, which FSDP2 requests as the place for a rank's shard: a plain
    tensor would take the decoded values, and the parameter would silently no longer be quantized."""
    q, size = args[0], tuple(args[1])
    if len(size) == q.dim() and size[1:] == tuple(q.shape[1:]):
        raise NotImplementedError(
            f"QuantizedTensor: new_zeros({list(size)}) of {q.spec}, shape {list(q.shape)}: rows of a quantized tensor "
            "are not sharded (fully_shard), since columnwise codes and scales are shared by rows of several ranks. "
            "Call quire.distributed.gather_codes(model, recipe) first, which shards masters (keep_master=True), shard "
            "a model with plain parameters, use DistributedDataParallel, or call torch.zeros for a plain tensor"
        )
    return _plain_like(operator, args, kwargs)


def _detach_in_place(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0]  # autograd has done it


def _record_stream(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for tensor in args[0].named().values():
        if tensor is not None:
            operator(tensor, *args[1:], **kwargs)


def _is_pinned(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all([operator(tensor, *args[1:], **kwargs) for tensor in args[0].named().values() if tensor is not None])


_KEEPS_CODES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.alias.default, aten.clone.default), _to_each_buffer),
    aten.detach.default: _detach,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.zeros_like.default: _zeros_like,
    **dict.fromkeys((aten.ones_like.default, aten.full_like.default), _plain_like),
    **dict.fromkeys((aten.rand_like.default, aten.randn_like.default), _plain_like),
    **dict.fromkeys((aten.new_empty.default, aten.new_empty_strided.default), _new_empty),
    aten.new_zeros.default: _new_zeros,
    **dict.fromkeys((aten.pin_memory.default, aten._pin_memory.default), _to_each_buffer),
    aten.is_pinned.default: _is_pinned,
    aten.detach_.default: _detach_in_place,
    aten.record_stream.default: _record_stream,
}


QuantizedTensor.run_operator = staticmethod(run)
DecodedView.run_operator = staticmethod(run)


# --- views

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
