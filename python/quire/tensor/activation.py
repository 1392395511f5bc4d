"""A quantized tensor with a gradient: a layer passes it to the next layer if there is a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree  # the registry of containers; torch.export.register_dataclass takes no static fields

from quire.tensor.buffers import BUFFER_NAMES, DTYPES, named_buffers
from quire.tensor.decoded import Decoded
from quire.tensor.directions import other_direction
from quire.tensor.making import from_list
from quire.tensor.proto import TensorProto, check_buffers
from quire.tensor.quantized import QuantizedTensor
from quire.tensor.spec import QuantSpec


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """The codes and scales of a tensor that has a gradient. quire.quantize and layers return it (fp8_output,
    output_spec), and layers accept it as x.

    carrier: a tensor with the shape and dtype of the decoded tensor and the memory of one element. Its value is not
        used. Autograd passes the gradient through it, as if quantization were the identity (straight-through).
    buffers: the six buffers in the order of quire.tensor.BUFFER_NAMES, None if absent.
    spec_text: the canonical text of the spec.

    Functions, methods and operators of PyTorch compute on the decoded values, with the gradient, and return plain
    tensors: torch.relu(q), q.float(), q + 1. Methods that write in place raise TypeError. backward(), register_hook()
    and the like are those of the carrier.

    It consists of plain tensors and is a pytree. So it can be an argument or a result of a compiled function. Its parts
    are checked when it is used: TypeError for parts of other types, RuntimeError or ValueError for shapes or dtypes
    that do not fit the spec.
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
            f"buffers {[type(buffer).__name__ for buffer in buffers or ()]} and spec_text {text!r}. quire.quantize "
            "makes one"
        )

    def detach(self) -> QuantizedTensor:
        """The same buffers as a QuantizedTensor without a gradient."""
        self.check()
        buffers = [None if buffer is None else buffer.detach() for buffer in self.buffers]
        return from_list(buffers, self.spec_text, self.shape, self.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded tensor, as QuantizedTensor.dequantize; its gradient is that of the carrier."""
        self.check()
        dtype = self.dtype if dtype is None else dtype
        return Decoded.apply(self.carrier, self.detach(), dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            raise TypeError(
                f"{func} was given a QuantizedActivation; operators take plain tensors. Pass its carrier and "
                "buffer_list(), or dequantize()"
            )
        # Dynamo does not read names of functions.
        if args and isinstance(args[0], cls) and not torch.compiler.is_compiling() and _writes(func.__name__):
            raise _not_written(func.__name__)
        args, kwargs = _pytree.tree_map(_decoded, (args, kwargs or {}), is_leaf=lambda part: isinstance(part, cls))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CARRIER:
            return getattr(self.carrier, name)
        if name.startswith("_") or not callable(getattr(torch.Tensor, name, None)):
            raise AttributeError(f"'QuantizedActivation' object has no attribute {name!r}; dequantize() gives a tensor")
        if _writes(name):
            raise _not_written(name)
        return getattr(self.dequantize(), name)

    def __repr__(self) -> str:
        return (
            f"QuantizedActivation({self.spec_text!r}, shape={list(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad})"
        )


#: Attributes and methods of torch.Tensor that need no values.
_OF_CARRIER = frozenset(
    "backward dim grad grad_fn is_cpu is_cuda is_leaf is_meta layout ndim numel register_hook retain_grad size".split()
)
_OPERATORS = "bool add radd sub rsub mul rmul truediv rtruediv pow rpow matmul rmatmul neg abs getitem len iter".split()


def _writes(method: str) -> bool:
    """Whether a method of torch.Tensor of that name writes to the tensor."""
    return method.endswith("_") and not method.endswith("__") or method == "__setitem__"


def _not_written(method: str) -> TypeError:
    return TypeError(
        f"QuantizedActivation.{method}: codes that have a gradient cannot be changed; use dequantize(), which gives a "
        "tensor, and quantize that again"
    )


def _decoded(part: Any) -> Any:
    return part.dequantize() if isinstance(part, QuantizedActivation) else part


def _operator(name: str) -> Callable[..., Any]:
    def compute(self: QuantizedActivation, *others: Any) -> Any:
        return getattr(torch.Tensor, name)(self.dequantize(), *map(_decoded, others))

    return compute


for _name in _OPERATORS:
    setattr(QuantizedActivation, f"__{_name}__", _operator(f"__{_name}__"))

_pytree.register_pytree_node(
    QuantizedActivation,
    lambda q: ([q.carrier, *q.buffers], q.spec_text),
    lambda tensors, text: QuantizedActivation(tensors[0], tuple(tensors[1:]), text),
    serialized_type_name="quire.QuantizedActivation",
)


def input_operand(
    x: QuantizedTensor | QuantizedActivation, columnwise: bool
) -> tuple[torch.Tensor, list[torch.Tensor | None], str]:
    """A quantized input as a product takes it: tensor for shape and gradient, six buffers, text of its spec.

    columnwise: the gradient of the weight will need that direction. Where it is not stored it is made: without loss
    where its codes follow from the stored ones (QuantizedTensor.update_usage), else by quantizing the decoded values.
    The same goes for a missing rowwise direction. Raises RuntimeError for a QuantizedTensor that requires a gradient,
    ValueError where the missing direction cannot be made. Sizes and dtypes of buffers are checked by the operators that
    take them.
    """
    if isinstance(x, QuantizedActivation):
        carrier, buffers, text = x.carrier, list(x.buffers), x.spec_text
    else:
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "quire: a QuantizedTensor as the input of a layer has no gradient; quantize the tensor that has one "
                "with quire.quantize, which gives a QuantizedActivation, or detach() it"
            )
        carrier, buffers, text = x.carrier(), x.buffer_list(), x.spec_text
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
