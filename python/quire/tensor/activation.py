"""A quantized tensor with a gradient: a layer passes it to the next layer if there is a backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree  # the registry of containers; torch.export.register_dataclass takes no static fields

from quire.tensor.buffers import BUFFER_NAMES, DTYPES, DataTensors, named_buffers
from quire.tensor.decoded import Carried, Decoded
from quire.tensor.directions import other_direction
from quire.tensor.making import from_list
from quire.tensor.proto import TensorProto, check_buffers
from quire.tensor.quantized import QuantizedTensor
from quire.tensor.spec import QuantSpec
from quire.tensor.used_as_tensor import UsedAsTensor


@dataclass(frozen=True, eq=False)
class QuantizedActivation(UsedAsTensor, DataTensors):
    """The codes and scales of a tensor that has a gradient. quire.quantize and layers return it (fp8_output,
    output_spec), and layers accept it as x.

    carrier: a tensor with the shape and dtype of the decoded tensor and the memory of one element. Its value is not
        used. Autograd passes the gradient through it, as if quantization were the identity (straight-through).
    buffers: the six buffers in the order of quire.tensor.BUFFER_NAMES, None if absent.
    spec_text: the canonical text of the spec.

    rowwise_data, rowwise_scale and so on: the buffers by name.

    PyTorch's functions, arithmetic and the methods of a tensor take its decoded values and return plain tensors, whose
    gradient reaches the carrier: y.sum(), x + y, torch.cat([x, y]). They raise TypeError if they would write to it.

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

    def __getattr__(self, name: str) -> Any:
        return self.buffers[BUFFER_NAMES.index(name)] if name in BUFFER_NAMES else super().__getattr__(name)

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

    def __repr__(self) -> str:
        return (
            f"QuantizedActivation({self.spec_text!r}, shape={list(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad})"
        )


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
    """A quantized input as a product takes it: tensor for shape and gradient, six buffers, text of its spec.

    columnwise: the gradient of the weight will need that direction. Where it is not stored it is made: without loss
    where its codes follow from the stored ones (QuantizedTensor.update_usage), else by quantizing the decoded values.
    The same goes for a missing rowwise direction. Raises ValueError where the missing direction cannot be made. Sizes
    and dtypes of buffers are checked by the operators that take them.
    """
    if isinstance(x, QuantizedActivation):
        carrier, buffers, text = x.carrier, list(x.buffers), x.spec_text
    else:
        wanted = x.requires_grad and torch.is_grad_enabled()
        carrier = Carried.apply(x) if wanted else x.carrier()
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
