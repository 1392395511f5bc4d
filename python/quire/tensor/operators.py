"""What PyTorch's operators do with a QuantizedTensor: keep the codes, change them in place, or compute on values."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from quire.tensor.buffers import DTYPES
from quire.tensor.decoded import each
from quire.tensor.order import is_interleaved, reordered, same_codes
from quire.tensor.quantized import QuantizedTensor
from quire.tensor.views import view

aten = torch.ops.aten
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: What a matmul of PyTorch calls with its weight; F.linear transposes it first.
_OF_MATMULS = (aten.linear.default, aten.t.default, aten.mm.default, aten.addmm.default, aten.bmm.default)


def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator that was given at least one QuantizedTensor."""
    if operator.namespace == "quire":
        raise TypeError(
            f"{operator} was given a QuantizedTensor; it takes plain tensors, and decoding one here would hide a loss "
            "of speed and accuracy. Pass its buffers (buffer_list()), its carrier(), or dequantize()"
        )
    handler = _KEEPS_CODES.get(operator)
    if handler is not None and isinstance(args[0], QuantizedTensor):
        result = handler(operator, args, kwargs)
    elif operator.is_view and isinstance(args[0], QuantizedTensor):
        result = view(args[0], operator, args, kwargs)
    elif written := _written(operator):
        return _write(operator, written, args, kwargs)
    else:
        result = None
    return _on_values(operator, args, kwargs) if result is None else result


def _on_values(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operator in _OF_MATMULS:
        _tell_decoding()

    def decoded(value: Any) -> Any:
        return value.dequantize() if isinstance(value, QuantizedTensor) else value

    return operator(*each(decoded, args), **{name: each(decoded, value) for name, value in kwargs.items()})


@functools.cache
def _tell_decoding() -> None:
    """Warns once."""
    warnings.warn(
        "QuantizedTensor: a matmul of PyTorch, such as that of a torch.nn.Linear with a quantized weight, decodes the "
        "weight in every call and does not quantize x. To use the codes, convert the layer: quire.convert(model, "
        "recipe, for_inference=True, tokens=None, min_features=1)",
        stacklevel=2,
    )


# --- results that are made of the same codes


def _to_each_buffer(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    q = args[0]
    named = q.named()
    results = {name: None if t is None else operator(t, *args[1:], **kwargs) for name, t in named.items()}
    is_part = q.is_part and operator.is_view  # a copy has its scales to itself
    return q.with_buffers(results, is_part=is_part).remember_like(q, alias=operator.is_view)


def _detach(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor:
    """A tensor of the very same buffers, which have no gradient. Tracers need tensors that the operator gave them."""
    q = args[0]
    named = q.named()
    if all([type(t) is torch.Tensor for t in named.values() if t is not None]):
        return q.with_buffers(named).remember_like(q, alias=True)
    return _to_each_buffer(operator, args, kwargs)


def _to_copy(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor | None:
    """Another nominal dtype, and a copy of the buffers on another device."""
    q, dtype = args[0], kwargs.get("dtype")
    if dtype not in (None, *DTYPES):
        return None
    options = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
    results = {name: None if t is None else operator(t, **options) for name, t in q.named().items()}
    return q.with_buffers(results, dtype=dtype, is_part=False).remember_like(q)


def _empty_like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QuantizedTensor | None:
    q, dtype = args[0], kwargs.get("dtype")
    if dtype not in (None, *DTYPES):
        return _plain_like(operator, args, kwargs)
    device = kwargs.get("device")
    results = {name: None if t is None else torch.zeros_like(t, device=device) for name, t in q.named().items()}
    if q.given_scale is not None:  # a scale of zeros would be none
        lost = q.is_meta and results["given_scale"].device.type != "meta"
        results["given_scale"] = None if lost else q.given_scale.to(results["given_scale"].device, copy=True)
    return q.with_buffers(results, dtype=dtype, is_part=False)


def _plain_like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """zeros_like and its like look at shape, dtype and device only."""
    q = args[0]
    outline = torch.empty(q.shape, dtype=q.dtype, device="meta")
    device = q.device if kwargs.get("device") is None else kwargs["device"]
    return operator(outline, *args[1:], **{**kwargs, "device": device})


def _new_zeros(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Plain zeros; refuses the shape of some rows, which FSDP2 asks for to keep a rank's part in. A plain tensor would
    take the decoded values, and the parameter would no longer be a quantized one, without a word."""
    q, size = args[0], tuple(args[1])
    if len(size) == q.dim() and size[1:] == tuple(q.shape[1:]):
        raise NotImplementedError(
            f"QuantizedTensor: new_zeros({list(size)}) of {q.spec}, shape {list(q.shape)}: rows of a quantized tensor "
            "are not sharded (fully_shard), since columnwise codes and scales are shared by rows of several ranks. "
            "Call quire.distributed.gather_codes(model, recipe) first, which shards masters (keep_master=True), shard "
            "a model with plain parameters, use DistributedDataParallel, or call torch.zeros for a plain tensor"
        )
    return _plain_like(operator, args, kwargs)


_KEEPS_CODES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.alias.default, aten.clone.default), _to_each_buffer),
    aten.detach.default: _detach,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    **dict.fromkeys((aten.zeros_like.default, aten.ones_like.default, aten.full_like.default), _plain_like),
    **dict.fromkeys((aten.rand_like.default, aten.randn_like.default), _plain_like),
    **dict.fromkeys((aten.new_empty.default, aten.new_empty_strided.default), _plain_like),
    aten.new_zeros.default: _new_zeros,
}


# --- operators that write


@functools.cache
def _written(operator: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator writes to."""
    arguments = operator._schema.arguments  # the only place where PyTorch says so
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _write(operator: Any, written: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes on values in place of each QuantizedTensor, then quantizes those that were written to."""
    if operator is aten.copy_.default and _copy_codes(*args[:2]):
        return args[0]
    if operator.name().startswith("aten::_fused_"):
        return _write_one_by_one(operator, written, args, kwargs)
    values: dict[int, torch.Tensor] = {}  # by id of the tensor that they stand for
    targets: list[QuantizedTensor] = []

    def value_of(argument: Any, target: bool = False) -> Any:
        if not isinstance(argument, QuantizedTensor):
            return argument
        if id(argument) not in values:
            if target:
                argument.check_writable()
                targets.append(argument)
            exact = target or any([one.master is not None for one in targets])
            values[id(argument)] = argument.dequantize() if argument.master is None else _master(argument, exact)
        return values[id(argument)]

    # Where a master is written, masters are read too, and not what is left of them in the nominal dtype.
    new_args, new_kwargs = list(args), dict(kwargs)
    for position, name in written:  # first, so that add_(q, q) finds one value for both
        place, key = (new_args, position) if position < len(args) else (new_kwargs, name)
        if place is new_args or name in new_kwargs:
            place[key] = each(functools.partial(value_of, target=True), place[key])
    new_args = each(value_of, new_args)
    new_kwargs = {name: each(value_of, value) for name, value in new_kwargs.items()}
    if targets and "lerp_" in operator.name():
        new_args = _of_one_dtype(new_args)
    result = operator(*new_args, **new_kwargs)
    for target in targets:
        if values[id(target)].shape != target.shape:
            raise RuntimeError(
                f"{operator} would give a QuantizedTensor of shape {list(target.shape)} the shape "
                f"{list(values[id(target)].shape)}; it keeps its shape. Use an operator that returns a new tensor"
            )
    for target in targets:
        target.store(values[id(target)], scale=target.given_scale)
    back = {id(values[id(target)]): target for target in targets}
    return each(lambda value: back.get(id(value), value), result)


def _master(q: QuantizedTensor, exact: bool) -> torch.Tensor:
    return q.master if exact else q.master.to(q.dtype)


def _of_one_dtype(args: list[Any]) -> list[Any]:
    """lerp_'s, or _foreach_lerp_'s, which take tensors of one dtype only, where others promote: that of the first."""
    if isinstance(args[0], torch.Tensor):
        return [arg.to(args[0].dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]
    each = []
    for i in range(len(args[0])):
        each.append(_of_one_dtype([arg[i] if isinstance(arg, list | tuple) else arg for arg in args]))
    return [[one[i] for one in each] if isinstance(arg, list | tuple) else arg for i, arg in enumerate(args)]


def _write_one_by_one(
    operator: Any, written: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """An optimizer's fused step over lists: one call a parameter, since its dtypes must agree and masters differ."""
    count = len(args[0])
    names = {name for _, name in written}
    schema = [argument.name for argument in operator._schema.arguments]
    for i in range(count):
        call = dict(zip(schema, args, strict=False)) | kwargs
        call = {name: value[i : i + 1] if isinstance(value, list | tuple) else value for name, value in call.items()}
        q = call[schema[0]][0]
        if isinstance(q, QuantizedTensor):
            _fused_step(operator, call, q, names)
        else:
            operator(**call)


def _fused_step(operator: Any, call: dict[str, Any], q: QuantizedTensor, written: set[str]) -> None:
    q.check_writable()
    values = q.dequantize() if q.master is None else q.master

    def fits(tensor: Any) -> Any:
        plain = isinstance(tensor, torch.Tensor) and tensor.shape == q.shape
        return tensor.to(values.dtype) if plain else tensor

    first = next(iter(call))
    new = {name: each(fits, value) for name, value in call.items()} | {first: [values]}
    operator(**new)
    for name in written - {first}:
        for old, tensor in zip(call[name], new[name], strict=True):
            if old is not tensor:
                old.copy_(tensor)
    q.store(values, scale=q.given_scale)


def _copy_codes(target: QuantizedTensor, source: Any) -> bool:
    """Copies bytes between tensors of one shape and spec, whatever the order of codes; False if they are not."""
    quantized = isinstance(target, QuantizedTensor) and isinstance(source, QuantizedTensor)
    if not quantized or target.stacked != source.stacked or target.shape != source.shape:
        return False
    if not same_codes(target.spec_text, source.spec_text):
        return False
    target.check_writable(seeded=True)  # nothing is rounded
    source = reordered(source, is_interleaved(target.spec_text))
    new = source.named()
    for direction in ("rowwise", "columnwise"):
        if target.stores(direction) and not source.stores(direction):
            new |= source.missing_direction(direction, requantize=True)
    if target.master is not None:
        target.master.copy_(source.dequantize(torch.float32) if source.master is None else source.master)
    target.forget_origin()
    for name, tensor in target.buffers().items():
        tensor.copy_(new[name])
    target.remember_like(source)
    if target.given_scale is not None and source.given_scale is not None:
        target.given_scale.copy_(source.given_scale)
    return True


QuantizedTensor.run_operator = staticmethod(run)
