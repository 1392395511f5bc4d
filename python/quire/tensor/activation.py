"""A quantized tensor with a gradient. A layer passes it to the next layer if there is a backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree  # the registry of containers; torch.export.register_dataclass takes no static fields

from quire.checks import describe
from quire.loading.deferred import assume_constant_result
from quire.tensor.buffers import (
    BUFFER_NAMES,
    DTYPES,
    DataTensors,
    TensorProto,
    check_buffers,
    from_list,
    named_buffers,
    other_direction,
)
from quire.tensor.decoded import carried, decoded, each
from quire.tensor.quantized import QuantizedTensor
from quire.tensor.spec import QuantSpec

#: Attributes and methods of a tensor that do not depend on its values, and hooks on its gradient: the carrier's. The
#: first four are properties, which a carrier that is no tensor does not have.
_OF_CARRIER = frozenset(
    "shape dtype device requires_grad ndim grad_fn grad is_leaf is_cpu is_cuda is_meta layout size dim ndimension "
    "numel nelement get_device is_floating_point is_complex register_hook retain_grad".split()
)
#: Attributes that depend on the values.
_OF_VALUES = frozenset(("T", "mT"))
#: Methods about the memory of the values, which do not exist in memory.
_OF_MEMORY = frozenset("data_ptr storage untyped_storage storage_offset stride is_contiguous share_memory".split())


@dataclass(frozen=True, eq=False)
class QuantizedActivation(DataTensors):
    """The codes and scales of a tensor that has a gradient. quire.quantize and layers return it (fp8_output,
    output_spec), and layers accept it as x.

    rowwise_data, rowwise_scale and so on: the buffers by name.

    PyTorch's functions, arithmetic and the methods of a tensor take its decoded values and return plain tensors, whose
    gradient reaches the carrier: y.sum(), x + y, torch.cat([x, y]). They raise TypeError if they would write to it.

    It consists of plain tensors and is a pytree. So it can be an argument or a result of a compiled function. Its parts
    are checked when it is used: TypeError for parts of other types, RuntimeError or ValueError for shapes or dtypes
    that do not fit the spec.

    Args:
        carrier: a tensor with the shape and dtype of the decoded tensor and the memory of one element. Its value is not
            used. Autograd passes the gradient through it, as if quantization were the identity (straight-through).
        buffers: the six buffers in the order of quire.tensor.BUFFER_NAMES, None if absent.
        spec_text: the canonical text of the spec.
    """

    carrier: torch.Tensor
    buffers: tuple[torch.Tensor | None, ...]
    spec_text: str

    @property
    def shape(self) -> torch.Size:
        return self.carrier.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which it is decoded by default, and the dtype of its gradient."""
        return self.carrier.dtype

    @property
    def device(self) -> torch.device:
        return self.carrier.device

    @property
    def requires_grad(self) -> bool:
        return self.carrier.requires_grad

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(self.spec_text)

    def buffer_list(self) -> list[torch.Tensor | None]:
        """The six buffers, as operators take them."""
        return list(self.buffers)

    def check(self) -> None:
        """Raises TypeError if a part has a wrong type. The operators that read the buffers check their shapes."""
        carrier, buffers, text = self.carrier, self.buffers, self.spec_text
        tensors = isinstance(carrier, torch.Tensor) and carrier.dtype in DTYPES and isinstance(buffers, list | tuple)
        if tensors and len(buffers) == 6 and isinstance(text, str) and "," not in text:
            absent = [buffer is None for buffer in buffers]
            plain = [isinstance(buffer, torch.Tensor | None) for buffer in buffers]
            if all(plain) and not (absent[0] and absent[3]):
                return
        raise TypeError(
            "QuantizedActivation: its parts are a carrier of float32, float16 or bfloat16, six buffers (tensors, or "
            f"None where absent) and the text of a spec; got a carrier {getattr(carrier, 'dtype', type(carrier))}, "
            f"buffers {_kinds(buffers)} and spec_text {describe(text)}. quire.quantize makes one"
        )

    def detach(self) -> QuantizedTensor:
        """The same buffers as a QuantizedTensor without a gradient."""
        self.check()
        buffers = [None if buffer is None else buffer.detach() for buffer in self.buffers]
        return from_list(buffers, self.spec_text, self.shape, self.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded tensor, as QuantizedTensor.dequantize; its gradient is that of the carrier.

        Args:
            dtype: as for QuantizedTensor.dequantize.

        Raises:
            TypeError: for what is no dtype, and for parts of wrong types.
            RuntimeError: for another dtype, and for parts that do not fit the spec.
            ValueError: for the text of no spec, and as QuantizedTensor.dequantize.
        """
        self.check()
        dtype = self.dtype if dtype is None else dtype
        return decoded(self.carrier, self.detach(), dtype)

    def __repr__(self) -> str:
        if not isinstance(self.carrier, torch.Tensor):  # functions of pytrees make them of anything
            return f"QuantizedActivation({describe(self.carrier)}, {_kinds(self.buffers)}, {describe(self.spec_text)})"
        return (
            f"QuantizedActivation({self.spec_text!r}, shape={list(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad})"
        )

    # ------------------------------------------------------------ PyTorch's functions and methods, on decoded values

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
        written = [[*args, *kwargs.values()][0]] if kind == "writes" or kwargs.get("inplace") else []
        if any([isinstance(one, cls) for one in _flat([*written, kwargs.get("out")])]):
            raise _cannot_be_written(cls)
        return func(*each(_decoded, args), **{key: each(_decoded, value) for key, value in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        if name in BUFFER_NAMES:
            if not isinstance(self.buffers, list | tuple):
                self.check()
            return self.buffers[BUFFER_NAMES.index(name)]
        if name in _OF_CARRIER:
            if not isinstance(self.carrier, torch.Tensor):
                raise AttributeError(f"{self!r} has no {name}, because its parts are no tensors")
            return getattr(self.carrier, name)
        if name in _OF_VALUES:
            return getattr(self.dequantize(), name)
        if name.startswith("_") or name in _OF_MEMORY or not callable(getattr(torch.Tensor, name, None)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if _writes(name):
            raise _cannot_be_written(type(self))
        return functools.partial(_call, self, name)


def _call(self: QuantizedActivation, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(self.dequantize(), name)(*args, **kwargs)


# Dynamo can trace comparisons of functions, but not their names.
@assume_constant_result
def _kind(func: Callable[..., Any]) -> str:
    """Whether it is an operator of "quire", the operator "@", or "writes" to its first argument; "" for all others."""
    if func is torch.Tensor.matmul:  # what Dynamo calls for the operator
        return "@"
    if str(func).startswith("quire."):
        return "quire"
    return "writes" if _writes(getattr(func, "__name__", "")) else ""


def _flat(values: list[Any]) -> list[Any]:
    """The values, and those in lists and tuples among them."""
    return [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]


def _kinds(buffers: Any) -> str:
    """The types of buffers, for errors."""
    if not isinstance(buffers, list | tuple):
        return describe(buffers)
    return str([type(buffer).__name__ for buffer in buffers])


def _writes(name: str) -> bool:
    """Whether the method or function of that name writes to its first argument."""
    return name.endswith("_") and not name.startswith("__")


def _cannot_be_written(cls: type) -> TypeError:
    return TypeError(f"{cls.__name__}: its decoded values are not in memory and cannot be written; use dequantize()")


def _decoded(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedActivation) else value


def _operator(name: str) -> Callable[..., torch.Tensor]:
    def operator(self: QuantizedActivation, *args: Any) -> torch.Tensor:
        return getattr(self.dequantize(), name)(*each(_decoded, args))

    return operator


#: Python looks these methods up in the class. Equality is left out, because containers find an object by it.
for _name in "add sub mul truediv floordiv pow matmul mod".split():
    for _prefix in ("", "r"):
        setattr(QuantizedActivation, f"__{_prefix}{_name}__", _operator(f"__{_prefix}{_name}__"))
for _name in "neg abs getitem iter lt le gt ge".split():
    setattr(QuantizedActivation, f"__{_name}__", _operator(f"__{_name}__"))


#: For torch.export, which names the parts of inputs.
_KEYS = [_pytree.GetAttrKey(name) for name in ("carrier", *BUFFER_NAMES)]
_pytree.register_pytree_node(
    QuantizedActivation,
    lambda q: ([q.carrier, *q.buffers], q.spec_text),
    lambda tensors, text: QuantizedActivation(tensors[0], tuple(tensors[1:]), text),
    serialized_type_name="quire.QuantizedActivation",
    flatten_with_keys_fn=lambda q: (list(zip(_KEYS, [q.carrier, *q.buffers], strict=True)), q.spec_text),
)
torch.serialization.add_safe_globals([QuantizedActivation])  # an exported program stores its inputs


def input_operand(
    x: QuantizedTensor | QuantizedActivation, columnwise: bool
) -> tuple[torch.Tensor, list[torch.Tensor | None], str]:
    """A quantized input in the form that a product takes: a tensor for shape and gradient, six buffers, text of the
    spec.

    columnwise: the gradient of the weight will need that direction. If it is not stored, it is made: without loss
    if its codes follow from the stored ones (QuantizedTensor.update_usage), else by quantizing the decoded values. A
    missing rowwise direction is made in the same way. Raises ValueError if a direction cannot be made. The operators
    that take the buffers check sizes and dtypes.
    """
    if isinstance(x, QuantizedActivation):
        carrier, buffers, text = x.carrier, list(x.buffers), x.spec_text
    else:
        wanted = x.requires_grad and torch.is_grad_enabled()
        carrier = carried(x) if wanted else x.carrier()
        buffers, text = x.buffer_list(), x.spec_text
    for first, name, wanted in ((0, "rowwise", True), (3, "columnwise", columnwise)):
        if wanted and buffers[first] is None:
            # Not assigned to a slice, which Dynamo cannot trace.
            buffers = [*buffers[:first], *_made(buffers, text, carrier, name), *buffers[first + 3 :]]
    return carrier, buffers, text


def _made(
    buffers: list[torch.Tensor | None], text: str, carrier: torch.Tensor, wanted: str
) -> list[torch.Tensor | None]:
    spec = QuantSpec(text)
    given = {name: buffer for name, buffer in zip(BUFFER_NAMES, buffers, strict=True) if buffer is not None}
    directions = {"rowwise": wanted == "columnwise", "columnwise": wanted == "rowwise"}
    check_buffers("quire", given, TensorProto(tuple(carrier.shape), carrier.dtype, spec, **directions))
    with torch.no_grad():
        named = other_direction(spec, carrier.shape, dict(zip(BUFFER_NAMES, buffers, strict=True)), wanted)
        if named is None:
            if spec.stochastic:
                raise ValueError(
                    f"quire: {wanted} codes of {text} do not follow from the stored ones; quantize in both directions"
                )
            values = from_list(buffers, text, carrier.shape, carrier.dtype).dequantize(torch.float32)
            rowwise = wanted == "rowwise"
            results = torch.ops.quire.quantize(values, text, rowwise, not rowwise, 0, 0, None)
            named = named_buffers(results, rowwise, not rowwise)
    return [named[name] for name in BUFFER_NAMES if name.startswith(wanted)]
