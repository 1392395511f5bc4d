"""The plain tensors with which PyTorch's operators compute in place of quantized ones: masters, or decoded codes."""

from __future__ import annotations

from typing import Any

import torch

from quire.tensor.decoded import DecodedView, Window
from quire.tensor.quantized import QuantizedTensor

#: Matmuls of PyTorch, all overloads. They decode the codes of a weight that has a master too, as layers do. In
#: inference mode those that consist of others come as they are.
_MATMULS = frozenset(
    f"aten::{name}"
    for name in (
        *("linear", "matmul", "mm", "addmm", "_addmm_activation", "bmm", "addbmm", "baddbmm", "mv", "addmv", "dot"),
        *("inner", "tensordot", "einsum", "bilinear", "_trilinear", "_grouped_mm", "chain_matmul"),
        *("linalg_matmul", "linalg_multi_dot"),
    )
)
KINDS = (QuantizedTensor, DecodedView)


def is_matmul(operator: Any) -> bool:
    return operator._schema.name.rstrip("_") in _MATMULS


class Values:
    """The plain tensors that stand for the quantized ones in one call. apart: masters that are written are copied
    first. of_codes: masters are not read."""

    def __init__(self, apart: bool = False, of_codes: bool = False) -> None:
        self._apart, self._of_codes = apart, of_codes
        self.bases: dict[Any, tuple[QuantizedTensor, torch.Tensor]] = {}  # by memory: what is written, and its values
        self._plain: dict[int, torch.Tensor] = {}  # by id of what they stand for
        self._masters: set[int] = set()  # the memory of those that are read
        self._written: list[tuple[Any, torch.Tensor, tuple[Any, ...]]] = []

    def to_write(self, argument: Any) -> Any:
        """Replaces an argument that is written by plain values, which are quantized afterwards."""
        if not isinstance(argument, KINDS):
            return argument
        if id(argument) not in self._plain:
            window, base = _window(argument)
            memory = _memory(base)
            if memory not in self.bases:
                base.check_writable()
                new = base.dequantize() if base.master is None else base.master
                self.bases[memory] = base, new.clone() if self._apart and base.master is not None else new
            new = _shaped(self.bases[memory][1], base)
            plain = self._plain[id(argument)] = new if window is None else window.of(new)
            self._written.append((argument, plain, _geometry(plain)))
        return self._plain[id(argument)]

    def to_read(self, argument: Any) -> Any:
        """Replaces an argument that is only read by plain values. If a master is written, masters are read too, without
        rounding them to the nominal dtype."""
        if not isinstance(argument, KINDS):
            return argument
        if id(argument) not in self._plain:
            window, base = _window(argument)
            exact = any([written.master is not None for written, _ in self.bases.values()])
            if (memory := _memory(base)) in self.bases:
                new = _shaped(self.bases[memory][1], base)
            elif base.master is not None and not self._of_codes:
                new = base.master if exact else base.master.to(base.dtype)
                self._masters.add(new.untyped_storage()._cdata)
            else:
                new = base.dequantize()
            self._plain[id(argument)] = new if window is None else window.of(new)
        return self._plain[id(argument)]

    def apart_from_masters(self, result: Any) -> Any:
        """A result of an operator that only reads, or a copy if it shares the memory of a master: not every schema says
        that a result may be an argument or a view of one."""
        dense = isinstance(result, torch.Tensor) and result.layout == torch.strided and not result.is_nested
        shares = bool(self._masters) and dense and result.untyped_storage()._cdata in self._masters
        return result.clone() if shares else result

    def changed_form(self, operator: Any) -> bool:
        """Whether an operator gave an argument other strides or another memory. Raises RuntimeError, before anything is
        stored, where that cannot be done to the tensor that the argument stands for."""
        changed = False
        for argument, plain, geometry in self._written:
            other = _geometry(plain) != geometry
            whole = isinstance(argument, QuantizedTensor) and not argument.is_part
            if plain.shape != argument.shape or (other and not whole):
                raise RuntimeError(
                    f"{operator} would give a {type(argument).__name__} of shape {list(argument.shape)} the shape "
                    f"{list(plain.shape)} and the strides {list(plain.stride())}; it keeps its shape. Use an operator "
                    "that returns a new tensor"
                )
            changed |= other
        return changed

    def store(self) -> None:
        """Quantizes what was written. It is not called for operators that change no value, such as resize_, because
        quantizing decoded values again can change codes."""
        for base, new in self.bases.values():
            base.store(new, scale=base.given_scale)

    def back(self, result: Any) -> Any:
        """The argument whose values the operator returned, in place of these values."""
        return next((argument for argument, plain, _ in self._written if plain is result), result)


def _window(argument: QuantizedTensor | DecodedView) -> tuple[Window | None, QuantizedTensor]:
    """The tensor whose storage an argument shares, and where in it the argument lies; None for all of it."""
    window = argument.window
    return window, argument if window is None else window.base


def _shaped(values: torch.Tensor, base: QuantizedTensor) -> torch.Tensor:
    """The values in the shape of `base`: a tensor with the same memory can have other leading sizes."""
    return values if values.shape == base.shape else values.view(base.shape)


def _memory(base: QuantizedTensor) -> Any:
    """A key that is equal for tensors that share their codes, such as results of detach() and views of all rows."""
    data = next(iter(base.buffers().values()))
    if type(data) is not torch.Tensor or data.is_meta or data.numel() == 0:
        return id(base)
    return data.device, data.data_ptr(), base.dtype


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage()._cdata
