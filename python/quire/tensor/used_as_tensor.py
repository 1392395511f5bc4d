"""What lets PyTorch take an object that is no tensor for the tensor that it decodes to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from quire.loading.for_dynamo import assume_constant_result
from quire.tensor.decoded import each

#: Attributes and methods of a tensor that do not depend on its values, and hooks on its gradient.
_OF_CARRIER = frozenset(
    "ndim grad_fn grad is_leaf is_cpu is_cuda is_meta layout size dim ndimension numel nelement get_device "
    "is_floating_point is_complex register_hook retain_grad".split()
)
#: Attributes that depend on the values.
_OF_VALUES = frozenset(("T", "mT"))
#: Methods that say where the values lie, which is nowhere.
_OF_MEMORY = frozenset("data_ptr storage untyped_storage storage_offset stride is_contiguous share_memory".split())


class UsedAsTensor:
    """A mixin of classes with `carrier`, a tensor of the same shape, dtype and device, and dequantize().

    PyTorch's functions, operators such as + and the methods of a tensor take the decoded values. The gradient reaches
    the carrier. Functions and methods that write to it raise TypeError: there are no values in memory.
    """

    carrier: torch.Tensor
    dequantize: Callable[..., torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "quire":
            raise TypeError(
                f"{cls.__name__}: an operator of quire takes plain tensors, and decoding one here would hide a loss of "
                "speed and accuracy. Pass its carrier and its buffers (buffer_list()), or dequantize()"
            )
        if kind == "@" and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{cls.__name__}: Dynamo exchanges the operands of @ where the left one is no tensor, and cannot tell "
                "this case from the other one; use torch.matmul or dequantize() in a compiled function"
            )
        if (kind == "writes" and isinstance(args[0], cls)) or isinstance(kwargs.get("out"), cls):
            raise _cannot_be_written(cls)
        return func(*each(_decoded, args), **{key: each(_decoded, value) for key, value in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CARRIER:
            return getattr(self.carrier, name)
        if name in _OF_VALUES:
            return getattr(self.dequantize(), name)
        if name.startswith("_") or name in _OF_MEMORY or not callable(getattr(torch.Tensor, name, None)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if _writes(name):
            raise _cannot_be_written(type(self))
        return functools.partial(_call, self, name)


def _call(self: UsedAsTensor, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(self.dequantize(), name)(*args, **kwargs)


# Dynamo knows functions, and not their names.
@assume_constant_result
def _kind(func: Callable[..., Any]) -> str:
    """Whether it is an operator of "quire", the operator "@", or "writes" to its first argument; "" for all others."""
    if func is torch.Tensor.matmul:  # what Dynamo calls for the operator
        return "@"
    if str(func).startswith("quire."):
        return "quire"
    return "writes" if _writes(getattr(func, "__name__", "")) else ""


def _writes(name: str) -> bool:
    """Whether the method or function of that name writes to its first argument."""
    return name.endswith("_") and not name.startswith("__")


def _cannot_be_written(cls: type) -> TypeError:
    return TypeError(f"{cls.__name__}: its decoded values are not in memory and cannot be written; use dequantize()")


def _decoded(value: Any) -> Any:
    return value.dequantize() if isinstance(value, UsedAsTensor) else value


def _operator(name: str) -> Callable[..., torch.Tensor]:
    def operator(self: UsedAsTensor, *args: Any) -> torch.Tensor:
        return getattr(self.dequantize(), name)(*each(_decoded, args))

    return operator


#: Python looks these up in the class. Not those of equality, by which containers find an object.
for _name in "add sub mul truediv floordiv pow matmul mod".split():
    for _prefix in ("", "r"):
        setattr(UsedAsTensor, f"__{_prefix}{_name}__", _operator(f"__{_prefix}{_name}__"))
for _name in "neg abs getitem iter lt le gt ge".split():
    setattr(UsedAsTensor, f"__{_name}__", _operator(f"__{_name}__"))
