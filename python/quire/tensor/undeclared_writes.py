"""Operators that write to an argument although their schemas do not say so, and all collectives."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from quire.tensor.decoded import each
from quire.tensor.decoded_view import DecodedView
from quire.tensor.quantized import QuantizedTensor
from quire.tensor.writes import exact_values, values_of, written_arguments

#: Operators, of all overloads, and the arguments that they write. Of those whose names end in "_" it is the first one.
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
#: Collectives whose results are there when a Work is waited for, which takes part in no other communication meanwhile.
#: Not so recv: the process that sends may wait for this one.
_WAITS = re.compile("c10d::(?!recv_)")
_COLLECTIVE = re.compile("_?c10d|symm_mem")


@functools.cache
def undeclared_writes(operator: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator writes to without a word in its schema, or as a collective."""
    name = operator._schema.name
    if name in _WRITTEN:
        return _WRITTEN[name]
    if declared := written_arguments(operator):
        return tuple([argument for _, argument in declared]) if _COLLECTIVE.match(name) else ()
    of_python = name.endswith("__")  # __and__ and its like
    return (operator._schema.arguments[0].name,) if name.endswith("_") and not of_python else ()


def write_undeclared(operator: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the operator on plain copies, and writes those that it changed to the tensors that they stand for. Raises
    TypeError for a collective that would write to a QuantizedTensor: it cannot know what the other processes send."""
    copies: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def to_write(argument: Any) -> Any:
        if not isinstance(argument, QuantizedTensor | DecodedView):
            return argument
        check_received(operator, argument)
        # A collective of several processes takes values of the nominal dtype; others keep what a master has.
        collective = _COLLECTIVE.match(operator._schema.name)
        plain = values_of(argument) if collective else exact_values(argument).clone()
        copies.append((argument, plain, plain.clone()))
        return plain

    schema = [argument.name for argument in operator._schema.arguments]
    call = dict(zip(schema, args, strict=False)) | kwargs
    call = {name: each(to_write if name in names else values_of, value) for name, value in call.items()}
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
