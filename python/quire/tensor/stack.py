"""QuantizedStack: quantized matrices of one shape as one tensor, such as the weights of a mixture's experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from quire.checks import check_type, describe, signed64
from quire.tensor.buffers import CLASSES, spec_of
from quire.tensor.quantized import Buffers, QuantizedTensor


class QuantizedStack(QuantizedTensor):
    """E quantized matrices [N, K] as one tensor [E, N, K], such as the weights of the experts of a mixture. Each matrix
    is quantized separately, to the same bytes as a QuantizedTensor: no block, transform or amax covers two matrices.

    Each buffer has the shape that it has for one matrix, after a first dimension E. stack[e], select() and unbind()
    return QuantizedTensors, and slices of the first dimension return QuantizedStacks. These share the memory of the
    stack: writing to them writes to the stack. It is a subclass of QuantizedTensor, and otherwise works as one.

    Args:
        spec: a QuantSpec or its text.
        shape: the logical shape [E, N, K].
        dtype: as for QuantizedTensor.
        requires_grad: as for QuantizedTensor.
        master: as for QuantizedTensor.
        given_scale: as for QuantizedTensor.
        is_part: as for QuantizedTensor.
        strides: as for QuantizedTensor.
        **buffers: the six buffers by name, each after a first dimension E.

    Raises:
        TypeError: as for QuantizedTensor.
        ValueError: as for QuantizedTensor, and for a shape that is not [E, N, K] with one matrix or more.
    """

    stacked = True

    @classmethod
    def of(cls, parts: Sequence[QuantizedTensor]) -> QuantizedStack:
        """A stack of copies of one or more matrices [N, K].

        Args:
            parts: a list of QuantizedTensors [N, K] that differ in nothing but their values.

        Raises:
            TypeError: for parts that are no list, and for a part that is not a QuantizedTensor.
            ValueError: for matrices that differ in spec, shape, dtype, device or what they store.
        """
        if isinstance(parts, torch.Tensor) or not isinstance(parts, Iterable):
            raise TypeError(
                f"QuantizedStack.of: parts must be a list of QuantizedTensors, got {describe(parts)}; pass [tensor]"
            )
        parts = list(parts)
        plain = [part for part in parts if not isinstance(part, QuantizedTensor)]
        if plain:
            raise TypeError(f"QuantizedStack.of: parts must be QuantizedTensors, got {describe(plain[0])}; quantize it")

        def kind(part: QuantizedTensor) -> str:
            stored = [name for name, tensor in part.named().items() if tensor is not None]
            return f"{part.spec_text} {list(part.shape)} {part.dtype} on {part.device} with {', '.join(stored)}"

        kinds = list(dict.fromkeys(map(kind, parts)))
        if len(kinds) != 1 or parts[0].dim() != 2:
            raise ValueError(
                "QuantizedStack.of: expected matrices of one spec, shape and dtype that store the same on one device, "
                f"got {'; '.join(kinds) or 'none'}. Quantize all of them the same way"
            )
        first = parts[0]
        each = [part.named() for part in parts]
        named = {name: None if t is None else torch.stack([one[name] for one in each]) for name, t in each[0].items()}
        return cls.unchecked(first.spec, (len(parts), *first.shape), first.dtype, **named)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], metadata: tuple[Any, ...], size: Sequence[int], stride: Sequence[int]
    ) -> QuantizedStack:
        text, dtype, is_part, _ = metadata
        return QuantizedStack.unchecked(spec_of(text), size, dtype, is_part=is_part, **inner)

    def part(self, index: int) -> QuantizedTensor:
        """Matrix number `index`. It shares the memory of the stack.

        Args:
            index: the number of the matrix, from 0; negative ones count from the end.

        Raises:
            TypeError: for an index that is no int.
            IndexError: for the number of no matrix.
        """
        if not isinstance(index, torch.SymInt):
            check_type("QuantizedStack.part", int, index=index)
        if not -self.shape[0] <= index < self.shape[0]:
            raise IndexError(
                f"QuantizedStack.part: index must be from {-self.shape[0]} to {self.shape[0] - 1}, got {index}"
            )
        named = {name: None if t is None else t[index] for name, t in self.named().items()}
        return QuantizedTensor.unchecked(self.spec, self.shape[1:], self.dtype, **named)

    def parts(self) -> list[QuantizedTensor]:
        """All matrices. They share the memory of the stack."""
        return [self.part(index) for index in range(self.shape[0])]

    def flat_buffers(self) -> list[torch.Tensor | None]:
        """The six buffers in order, each flattened to one dimension, as grouped operators take them."""
        return [None if tensor is None else tensor.flatten() for tensor in self.buffer_list()]

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([part.dequantize(dtype) for part in self.parts()])

    def store(
        self, values: torch.Tensor, seed: int | None = None, offset: int = 0, scale: torch.Tensor | None = None
    ) -> None:
        """As QuantizedTensor.store(); matrix e rounds with seed + e, and scale has one for each, [E]."""
        self.check_writable(seeded=seed is not None)
        count = self.shape[0]
        # Before the first matrix is written.
        if scale is not None and (scale.numel(), scale.dtype, scale.device) != (count, torch.float32, self.device):
            raise RuntimeError(
                f"QuantizedStack: scale must be float32 [{count}] on {self.device}, one for each matrix; got "
                f"{scale.dtype} {list(scale.shape)} on {scale.device}"
            )
        seeds = [None if seed is None else (signed64(seed, "seed") + index) % 2**64 for index in range(count)]
        signed64(offset, "offset")
        self.forget_origin()
        for index, part in enumerate(self.parts()):
            scale_of = None if scale is None else scale.reshape(-1)[index : index + 1]
            if scale is not None and scale is self.given_scale:
                scale_of = part.given_scale  # itself, as store() says
            part.store(values[index], seeds[index], offset, scale_of)

    def missing_direction(self, direction: str, *, requantize: bool) -> Buffers:
        """As QuantizedTensor.missing_direction()."""
        each = [part.missing_direction(direction, requantize=requantize) for part in self.parts()]
        return {name: None if t is None else torch.stack([one[name] for one in each]) for name, t in each[0].items()}


CLASSES[True] = QuantizedStack
torch.serialization.add_safe_globals([QuantizedStack])
