"""What torch.save and pickle hold of a quantized tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quire.tensor.proto import BUFFER_NAMES
from quire.tensor.spec import QuantSpec

if TYPE_CHECKING:
    from quire.tensor.quantized import QuantizedTensor


class Pickled:
    """A quantized tensor, of any class, that is pickled as the tensors it stores."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        flags = (type(self), self.requires_grad, isinstance(self, torch.nn.Parameter))
        return rebuild, (flags, self.spec_text, tuple(self.shape), self.dtype, list(self.named().values()))


def rebuild(
    flags: tuple[type[QuantizedTensor], bool, bool],
    text: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tensors: list[torch.Tensor | None],
) -> QuantizedTensor:
    """What a pickle holds: a tensor of the tensors of named(); flags (class, requires_grad, is a parameter)."""
    kind, requires_grad, is_parameter = flags
    named = dict(zip((*BUFFER_NAMES, "master", "given_scale"), tensors, strict=False))
    tensor = kind(QuantSpec(text), shape, dtype, requires_grad=requires_grad, **named)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor


torch.serialization.add_safe_globals([rebuild])
