"""QuantizedStack: quantized matrices of one shape as one tensor, such as the weights of a mixture's experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.checks import describe
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
    """

    stacked = True

    @classmethod
    def of(cls, parts: Sequence[QuantizedTensor]) -> QuantizedStack:
        """A stack of copies of one or more matrices [N, K].

        Args:
            parts: QuantizedTensors [N, K] that differ in nothing but their values.

        Raises:
            TypeError: for a part that is not a QuantizedTensor.
            ValueError: for matrices that differ in spec, shape, dtype or stored directions.
        """
        plain = [part for part in parts if not isinstance(part, QuantizedTensor)]
        if plain:
            raise TypeError(f"QuantizedStack.of: parts must be QuantizedTensors, got {describe(plain[0])}; quantize it")

        def kind(part: QuantizedTensor) -> tuple[Any, ...]:
            stored = tuple([name for name, tensor in part.named().items() if tensor is not None])
            return part.spec_text, tuple(part.shape), part.dtype, stored

        if not parts or parts[0].dim() != 2 or any(kind(part) != kind(parts[0]) for part in parts):
            raise ValueError(
                "QuantizedStack.of: expected matrices of one spec, shape and dtype that store the same, got "
                f"{[describe(part) for part in parts]}; quantize all of them the same way"
            )
        first = parts[0]
        each = [part.named() for part in parts]
        named = {name: None if t is None else torch.stack([one[name] for one in each]) for name, t in each[0].items()}
        return cls(first.spec, (len(parts), *first.shape), first.dtype, **named)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], metadata: tuple[Any, ...], size: Sequence[int], stride: Sequence[int]
    ) -> QuantizedStack:
        text, dtype, is_part, _ = metadata
        return QuantizedStack(spec_of(text), size, dtype, is_part=is_part, **inner)

    def part(self, index: int) -> QuantizedTensor:
        """Matrix number `index`. It shares the memory of the stack.

        Args:
            index: the number of the matrix.
        """
        named = {name: None if t is None else t[index] for name, t in self.named().items()}
        return QuantizedTensor(self.spec, self.shape[1:], self.dtype, **named)

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
        self.forget_origin()
        for index, part in enumerate(self.parts()):
            seed_of = None if seed is None else seed + index
            part.store(values[index], seed_of, offset, None if scale is None else scale.view(-1)[index : index + 1])

    def missing_direction(self, direction: str, *, requantize: bool) -> Buffers:
        """As QuantizedTensor.missing_direction()."""
        each = [part.missing_direction(direction, requantize=requantize) for part in self.parts()]
        return {name: None if t is None else torch.stack([one[name] for one in each]) for name, t in each[0].items()}


CLASSES[True] = QuantizedStack
torch.serialization.add_safe_globals([QuantizedStack])
