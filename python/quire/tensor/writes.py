"""Operators of PyTorch that write to a QuantizedTensor or to a view of one: they compute on values, and what they have
written is quantized into the same storage. Some schemas do not say what their operators write."""

from __future__ import annotations

import functools
import re
import sys
import threading
import warnings
from typing import Any

import torch

from quire.tensor.buffers import spec_of
from quire.tensor.decoded import DecodedView, each
from quire.tensor.order import in_order, is_interleaved, kept_directions, reordered, same_codes
from quire.tensor.quantized import QuantizedTensor
from quire.tensor.spec import QuantSpec
from quire.tensor.values import KINDS, Values, is_matmul

Written = tuple[tuple[int, str], ...]


def write(operator: Any, written: Written, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes on values in place of each quantized tensor, then quantizes those that were written to. written:
    positions and names of these arguments."""
    if operator is torch.ops.aten.copy_.default:
        if _copy_codes(*args[:2]):
            return args[0]
        if isinstance(args[1], QuantizedTensor) and not isinstance(args[0], KINDS) and args[1].master is None:
            tell_decoding(args[1].spec_text)
    if operator.name().startswith("aten::_fused_"):
        return _write_one_by_one(operator, written, args, kwargs)
    # Operators that change a tensor's form may fail after they have changed that of a master.
    names = [name for _, name in written]
    values = Values("out" in names or torch.Tag.inplace_view in operator.tags, is_matmul(operator))
    new_args, new_kwargs = list(args), dict(kwargs)
    for position, name in written:  # first, so that add_(q, q) finds one value for both
        place, key = (new_args, position) if position < len(args) else (new_kwargs, name)
        if place is new_args or name in new_kwargs:
            place[key] = each(values.to_write, place[key])
    new_args = each(values.to_read, new_args)
    new_kwargs = {name: each(values.to_read, value) for name, value in new_kwargs.items()}
    if values.bases and "lerp_" in operator.name():
        new_args = _of_one_dtype(new_args)
    result = operator(*new_args, **new_kwargs)
    if values.changed_form(operator) or torch.Tag.inplace_view not in operator.tags:
        values.store()
    return each(values.back, result)


def _of_one_dtype(args: list[Any]) -> list[Any]:
    """Arguments of lerp_ or _foreach_lerp_, converted to the dtype of the first one: unlike other operators, these two
    do not promote dtypes."""
    if isinstance(args[0], torch.Tensor):
        return [arg.to(args[0].dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]
    each = []
    for i in range(len(args[0])):
        each.append(_of_one_dtype([arg[i] if isinstance(arg, list | tuple) else arg for arg in args]))
    return [[one[i] for one in each] if isinstance(arg, list | tuple) else arg for i, arg in enumerate(args)]


def _write_one_by_one(operator: Any, written: Written, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The fused step of an optimizer over lists, by one call for each parameter: the dtypes in a call must agree, and
    masters have another dtype."""
    count = len(args[0])
    names = {name for _, name in written}
    schema = [argument.name for argument in operator._schema.arguments]
    for i in range(count):
        call = dict(zip(schema, args, strict=False)) | kwargs
        call = {name: value[i : i + 1] if isinstance(value, list | tuple) else value for name, value in call.items()}
        if isinstance(call[schema[0]][0], KINDS):
            _fused_step(operator, call, names)
        else:
            operator(**call)


def _fused_step(operator: Any, call: dict[str, Any], written: set[str]) -> None:
    values, first = Values(), next(iter(call))
    argument = call[first][0]
    plain = values.to_write(argument)

    def fits(tensor: Any) -> Any:
        same = isinstance(tensor, torch.Tensor) and tensor.shape == argument.shape
        return tensor.to(plain.dtype) if same else tensor

    new = {name: each(fits, value) for name, value in call.items()} | {first: [plain]}
    operator(**new)
    for name in written - {first}:
        for old, tensor in zip(call[name], new[name], strict=True):
            if old is not tensor:
                old.copy_(tensor)
    values.store()


def _copy_codes(target: Any, source: Any) -> bool:
    """Copies bytes between tensors of one shape if they mean the same under both specs. Otherwise returns False."""
    quantized = isinstance(target, QuantizedTensor) and isinstance(source, QuantizedTensor)
    if not quantized or target.is_part or target.stacked != source.stacked or target.shape != source.shape:
        return False
    source = _under(target.spec, source)
    if source is None:
        return False
    missing = [d for d in ("rowwise", "columnwise") if target.stores(d) and not source.stores(d)]
    target.check_writable(seeded=not missing)  # what is copied is not rounded
    source = reordered(source, is_interleaved(target.spec_text))
    new = source.named()
    for direction in missing:
        new |= source.missing_direction(direction, requantize=True)
    if target.master is not None:
        target.master.copy_(source.dequantize(torch.float32) if source.master is None else source.master)
    target.forget_origin()
    for name, tensor in target.buffers().items():
        tensor.copy_(new[name])
    if target.given_scale is not None and source.given_scale is not None:
        target.given_scale.copy_(source.given_scale)
    target.written()
    target.remember_like(source)
    return True


def _under(spec: QuantSpec, source: QuantizedTensor) -> QuantizedTensor | None:
    """The source as a tensor of that spec, with its codes in the order that they have. Directions whose bytes mean
    something else under the spec are left out; None if no direction is left."""
    if same_codes(spec.text, source.spec_text):
        return source
    kept = kept_directions(spec, source)
    if not kept:
        return None
    stored = (*kept, "master", "given")
    named = {name: tensor if name.split("_")[0] in stored else None for name, tensor in source.named().items()}
    if source.given_scale is not None and ("given" in spec.options) != ("given" in source.spec.options):
        named["given_scale"] = source.given_scale.reciprocal()  # a scale by one, a multiplier by the other
    return source.with_buffers(named, spec=spec_of(in_order(spec.text, is_interleaved(source.spec_text))))


# --- which arguments an operator writes to


@functools.cache
def written_arguments(operator: Any) -> Written:
    """Positions and names of the arguments that an operator writes to, by its schema."""
    arguments = operator._schema.arguments  # the only place where PyTorch says so
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


# --- operators that write to an argument although their schemas do not say so, and all collectives


#: Operators, all overloads, and the arguments that they write. One whose name ends in "_" writes its first argument.
_WRITTEN = {
    **dict.fromkeys(
        (
            "aten::batch_norm",
            "aten::_batch_norm_impl_index",
            "aten::native_batch_norm",
            "aten::cudnn_batch_norm",
            "aten::miopen_batch_norm",
            "aten::batch_norm_gather_stats",
            "aten::batch_norm_gather_stats_with_counts",
            "aten::batch_norm_update_stats",
            "aten::instance_norm",
        ),
        ("running_mean", "running_var"),
    ),
    **dict.fromkeys(("aten::_copy_from", "aten::_copy_from_and_resize"), ("dst",)),
    "_c10d_functional::irecv": ("tensor",),
    "_c10d_functional::batch_p2p_ops": ("tensors",),
    "c10d_functional::irecv": ("self",),
    "c10d_functional::batch_p2p_ops": ("tensors",),
    "c10d::monitored_barrier_": (),
    "inductor::accumulate_grad_": ("variable",),
}
#: Collectives that may be waited for at once (Work.wait()). recv may not: the process that sends may wait for this one.
_WAITS = re.compile("c10d::(?!recv_)")
_COLLECTIVE = re.compile("_?c10d|symm_mem")


@functools.cache
def undeclared_writes(operator: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator writes to although its schema does not say so, or as a collective."""
    name = operator._schema.name
    if name in _WRITTEN:
        return _WRITTEN[name]
    if declared := written_arguments(operator):
        return tuple([argument for _, argument in declared]) if _COLLECTIVE.match(name) else ()
    of_python = name.endswith("__")  # __and__ and its like
    return (operator._schema.arguments[0].name,) if name.endswith("_") and not of_python else ()


def write_undeclared(operator: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the operator on plain copies. Copies that it has changed are written to the tensors that they replace.
    Raises TypeError for a collective that would write to a QuantizedTensor: it cannot know what the other processes
    send."""
    copies: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    values = Values()

    def to_write(argument: Any) -> Any:
        if not isinstance(argument, QuantizedTensor | DecodedView):
            return argument
        check_received(operator, argument)
        # A collective of several processes takes values of the nominal dtype; others keep what a master has.
        collective = _COLLECTIVE.match(operator._schema.name)
        plain = (values.to_read(argument) if collective else Values().to_write(argument)).clone()
        copies.append((argument, plain, plain.clone()))
        return plain

    schema = [argument.name for argument in operator._schema.arguments]
    call = dict(zip(schema, args, strict=False)) | kwargs
    call = {name: each(to_write if name in names else values.to_read, value) for name, value in call.items()}
    with torch.no_grad():
        result = operator(**call)
        _wait(result)
        for argument, plain, before in copies:
            if not torch.equal(plain, before):
                argument.copy_(plain)
    back = {id(plain): argument for argument, plain, _ in copies}
    return each(lambda value: back.get(id(value), value), result)


def check_received(operator: Any, argument: Any) -> None:
    """Raises TypeError for an argument that a collective cannot write to."""
    name = operator._schema.name
    view = isinstance(argument, DecodedView)
    if not (view or isinstance(argument, QuantizedTensor)) or not _COLLECTIVE.match(name):
        return
    if view and _WAITS.match(name):
        return
    spec = argument.base.spec if view else argument.spec
    raise TypeError(
        f"{name} would write to a {type(argument).__name__} of {spec}, shape {list(argument.shape)}, and cannot know "
        "whether other processes send codes or values. If all processes have tensors of this spec, call it for each "
        "tensor of buffers().values(), and for master if there is one; else receive values in a plain tensor and "
        "copy_() that to this one"
    )


def _wait(result: Any) -> None:
    """Waits for a collective, whose last or only result is a torch.distributed.Work."""
    last = result[-1] if isinstance(result, list | tuple) and result else result
    if isinstance(last, torch.ScriptObject):
        torch.distributed.distributed_c10d.Work.unbox(last).wait()


# --- state dicts with quantized weights that are loaded into models whose weights are plain


#: Arguments of quire.convert that select the layers which have codes in a state dict.
SAME_LAYERS = (
    "min_features=1, filter=lambda layer, name: any(isinstance(state_dict.get(f'{name}.{own}'.lstrip('.')), "
    "quire.QuantizedTensor) for own, _ in layer.named_parameters())"
)
#: Set after the warning of tell_decoding().
TOLD = threading.Event()


def tell_decoding(spec: str) -> None:
    """Warns once if PyTorch loads codes of that spec into a plain tensor by copy_."""
    level = 0 if TOLD.is_set() else _level_of_caller()
    if level:
        TOLD.set()
        warnings.warn(
            f"load_state_dict: a weight that is quantized as {spec} is decoded, because the weight of the model is "
            "plain: the model has the errors of the codes and needs the memory of high precision. To load the codes, "
            "give the model the layers of the saved one first: quire.convert(model, recipe, for_inference=True, "
            f"tokens=None, {SAME_LAYERS}), and then load with assign=True",
            stacklevel=level,
        )


def _level_of_caller() -> int:
    """The stacklevel of the code that called PyTorch to load a state; 0 if PyTorch is not loading one."""
    level, loading, frame = 1, False, sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        loading = loading or frame.f_code.co_name == "_load_from_state_dict"
        loading = loading or module.startswith("torch.distributed.checkpoint.")
        if loading and not module.startswith(("torch.", "quire.")):
            return level
        level, frame = level + 1, frame.f_back
    return level - 1 if loading else 0
