"""Tensors of which each rank of a group has pieces as a plain tensor (Parallel), and torch.distributed.checkpoint,
which takes a plain tensor for one that all ranks have whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quire.checks import is_plain

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


class Piece(NamedTuple):
    """A block of a tensor: where it begins in the whole one and in this rank's shard, and its sizes."""

    first: tuple[int, ...]
    own: tuple[int, ...]
    sizes: tuple[int, ...]


class PlainPart(torch.Tensor):
    """What a state_dict has of a parameter or buffer that is this rank's shard. It is a plain tensor in everything, and
    torch.distributed.checkpoint, which would save or load it as the whole, gets an error."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def plain(self) -> torch.Tensor:
        """The same memory as a torch.Tensor, which is what pickles and copies have."""
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainPart:
        return memo.setdefault(id(self), self.clone().as_subclass(PlainPart))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        raise RuntimeError(
            f"quire: {fqn}, {list(self.shape)}, is this rank's shard of a tensor, which torch.distributed.checkpoint "
            "would take for the whole; save and load quire.TrainingState(model, optimizer), or, for a weight, shard "
            "the layer by parallelize_module instead of parallel="
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        raise RuntimeError(
            "quire: an entry is this rank's shard of a tensor, which torch.distributed.checkpoint would take for the "
            "whole; save and load quire.TrainingState(model, optimizer)"
        )


class PiecesOfTensor(torch.Tensor):
    """A tensor of which this rank has pieces, with the shape of the whole: torch.distributed.checkpoint saves and
    loads each piece at its place. It computes nothing, and is pickled as this rank's shard.

    given: this rank's shard, or a DTensor of which it has a shard. part: what it has of that, a plain tensor.
    """

    given: torch.Tensor
    part: torch.Tensor
    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(
        cls, given: torch.Tensor, part: torch.Tensor, pieces: tuple[Piece, ...], shape: Sequence[int]
    ) -> PiecesOfTensor:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        self.given, self.part, self.pieces = given, part, pieces
        return self

    @classmethod
    def of(cls, t: torch.Tensor, along: int, places: Sequence[tuple[int, int, int]], size: int) -> PiecesOfTensor:
        """It shares t's memory. t: this rank's shard, or a DTensor of it. along: the dimension that is sharded, of
        `size` in the whole tensor. places: (in the whole tensor, in t, size) of pieces along it."""
        shape = (*t.shape[:along], size, *t.shape[along + 1 :])
        if is_plain(t):
            part, starts = t, (0,) * t.dim()
        else:
            part, (chunk,) = t.to_local(), t.__create_chunk_list__()
            starts = tuple(chunk.offsets)
        pieces = []
        for first, own, length in places:
            begin = max(own, starts[along])
            end = min(own + length, starts[along] + part.shape[along])
            if begin < end and part.numel():
                whole, within, sizes = list(starts), [0] * t.dim(), list(part.shape)
                whole[along], within[along], sizes[along] = first + begin - own, begin - starts[along], end - begin
                pieces.append(Piece(tuple(whole), tuple(within), tuple(sizes)))
        return cls(t, part, tuple(pieces), shape)

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        aten, self = torch.ops.aten, args[0]
        if operator in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return self._of(operator(self.part, *args[1:], **(kwargs or {})))
        # So async_save begins its copy.
        if operator is aten.new_empty.default and tuple(args[1]) == tuple(self.shape):
            return self._of(operator(self.part, self.part.shape, **(kwargs or {})))
        raise NotImplementedError(
            f"{operator}: an entry of quire.TrainingState with pieces of a tensor is only saved and loaded; use its "
            ".part, a plain tensor"
        )

    def _of(self, part: torch.Tensor) -> PiecesOfTensor:
        """These pieces with other values."""
        return PiecesOfTensor(part, part, self.pieces, self.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.given.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        places = ", ".join(f"{list(piece.sizes)} at {list(piece.first)}" for piece in self.pieces)
        return f"PiecesOfTensor({places} of {list(self.shape)}, dtype={self.dtype})"

    # torch.distributed.checkpoint calls these of each entry that has them, as of DTensor.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(piece.first), torch.Size(piece.sizes)) for piece in self.pieces]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        piece = next(piece for piece in self.pieces if piece.first == tuple(index.offset))
        block = tuple(slice(own, own + size) for own, size in zip(piece.own, piece.sizes, strict=True))
        return self.part[block]
