"""What torch.save and pickle hold of a quantized tensor."""

from __future__ import annotations

from typing import Any

import torch

from quire.checks import check_dense, describe
from quire.tensor.buffers import BUFFER_NAMES
from quire.tensor.origin import Origin
from quire.tensor.proto import TensorProto, check_buffers
from quire.tensor.spec import QuantSpec

#: All that a tensor stores, in the order in which pickles have it.
STORED_NAMES = (*BUFFER_NAMES, "master", "given_scale")
_WHAT = "a saved QuantizedTensor"
_REMEDY = "the file is damaged or was not written by quire; save the tensor again"


class Pickled:
    """A quantized tensor, of any class, that is pickled as the tensors it stores."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """As of any tensor; the copy of a view of some rows has only these."""
        if self.is_part and self.is_leaf and id(self) not in memo:
            memo[id(self)] = self._apart()
        return super().__deepcopy__(memo)

    def _apart(self) -> torch.Tensor:
        """A copy of a view of some rows, with memory of its own."""
        copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(copied, self.requires_grad)
        return copied.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self.is_part:
            return self._apart().__reduce_ex__(protocol)
        flags = (type(self), self.requires_grad, isinstance(self, torch.nn.Parameter))
        parts = (flags, self.spec_text, tuple(self.shape), self.dtype, list(self.named().values()))
        return rebuild, parts if self.origin is None else (*parts, self.origin.state())


def rebuild(
    flags: tuple[type[Pickled], bool, bool],
    text: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tensors: list[torch.Tensor | None],
    *origin: object,
) -> Pickled:
    """What a pickle holds, from wherever it came: a tensor of the tensors of named(); flags (class, requires_grad, is a
    parameter); origin: nothing, or Origin.state(). Raises TypeError or ValueError for what __reduce_ex__ does not
    write."""
    _check_kinds(flags, text, shape, tensors)
    kind, requires_grad, is_parameter = flags
    named = dict(zip(STORED_NAMES, tensors, strict=True))
    given = {name: named[name] for name in BUFFER_NAMES if named[name] is not None}
    directions = {"rowwise": "rowwise_data" in given, "columnwise": "columnwise_data" in given}
    try:
        spec = QuantSpec(text)
        check_buffers(_WHAT, given, TensorProto(shape, dtype, spec, stacked=kind.stacked, **directions))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{_WHAT}: {error}; {_REMEDY}") from error
    device = next(iter(given.values())).device
    for name, of in (("master", shape), ("given_scale", (*shape[: kind.stacked], 1))):
        value = named[name]
        if value is not None and (tuple(value.shape), value.dtype, value.device) != (of, torch.float32, device):
            raise ValueError(
                f"{_WHAT}: {name} must be float32 {list(of)} on {device}, got {value.dtype} {list(value.shape)} on "
                f"{value.device}; {_REMEDY}"
            )
    if named["given_scale"] is not None and spec.family != "fp8_tensor" and "given" not in spec.options:
        raise ValueError(
            f"{_WHAT}: given_scale is of fp8_tensor and of the option given only, got one with {spec}; {_REMEDY}"
        )
    tensor = kind(spec, shape, dtype, requires_grad=requires_grad, **named)
    if origin:
        tensor.remember(Origin.of_state(origin[0]))
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor


def _check_kinds(flags: object, text: object, shape: object, tensors: object) -> None:
    kind = flags[0] if isinstance(flags, tuple) and len(flags) == 3 else None
    rules = {
        "flags must be a class of QuantizedTensor and two bools": isinstance(kind, type)
        and issubclass(kind, Pickled)
        and all([isinstance(flag, bool) for flag in flags[1:]]),
        "spec must be a text": isinstance(text, str),
        "shape must be a tuple of sizes": isinstance(shape, tuple)
        and all([type(size) is int and 0 <= size < 2**63 for size in shape]),
        f"tensors must be {len(STORED_NAMES)}, plain ones or None": isinstance(tensors, list)
        and len(tensors) == len(STORED_NAMES)
        and all([isinstance(t, torch.Tensor | None) and not isinstance(t, Pickled) for t in tensors]),
    }
    for rule, holds in rules.items():
        if not holds:
            got = ", ".join(describe(value) for value in (flags, text, shape, tensors))
            raise TypeError(f"{_WHAT}: {rule}, got ({got}); {_REMEDY}")
    check_dense(_WHAT, **{name: t for name, t in zip(STORED_NAMES, tensors, strict=True) if t is not None})


torch.serialization.add_safe_globals([rebuild])
