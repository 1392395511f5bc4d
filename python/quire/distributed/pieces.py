"""Tensors of which each process of a group has pieces as a plain tensor (Parallel), and torch.distributed.checkpoint,
which takes a plain tensor for one that all processes have whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


class Piece(NamedTuple):
    """`size` positions along the divided dimension: from `first` in the whole tensor, from `own` in this process's."""

    first: int
    own: int
    size: int


class PlainPart(torch.Tensor):
    """What a state_dict has of a parameter that is this process's part. It is a plain tensor in everything, and
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
            f"quire: {fqn}, {list(self.shape)}, is this process's part of a weight, which torch.distributed.checkpoint "
            "would take for the whole; save and load quire.TrainingState(model, optimizer), or divide the layer by "
            "parallelize_module instead of parallel="
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        raise RuntimeError(
            "quire: an entry is this process's part of a weight, which torch.distributed.checkpoint would take for the "
            "whole; save and load quire.TrainingState(model, optimizer)"
        )


class PiecesOfTensor(torch.Tensor):
    """A tensor of which this process has pieces, with the size of the whole: torch.distributed.checkpoint saves and
    loads each piece at its place. It computes nothing, and is pickled as this process's part."""

    part: torch.Tensor
    along: int  #: the dimension that is divided
    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, part: torch.Tensor, along: int, pieces: tuple[Piece, ...], size: int) -> PiecesOfTensor:
        """size: of the whole tensor along that dimension."""
        shape = [*part.shape[:along], size, *part.shape[along + 1 :]]
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        self.part, self.along, self.pieces = part, along, pieces
        return self

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        aten, given = torch.ops.aten, args[0]
        if operator in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return given._of(operator(given.part, *args[1:], **(kwargs or {})))
        # So async_save begins its copy.
        if operator is aten.new_empty.default and tuple(args[1]) == tuple(given.shape):
            return given._of(operator(given.part, given.part.shape, **(kwargs or {})))
        raise NotImplementedError(
            f"{operator}: an entry of quire.TrainingState with pieces of a tensor is only saved and loaded; use its "
            ".part, a plain tensor"
        )

    def _of(self, part: torch.Tensor) -> PiecesOfTensor:
        """The same pieces, with other values."""
        return PiecesOfTensor(part, self.along, self.pieces, self.shape[self.along])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.part.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        places = ", ".join(f"{piece.first}:{piece.first + piece.size}" for piece in self.pieces)
        return f"PiecesOfTensor({places} of {list(self.shape)} along dimension {self.along}, dtype={self.dtype})"

    # torch.distributed.checkpoint calls these of each entry that has them, as of DTensor.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        chunks = []
        for piece in self.pieces:
            offsets, sizes = [0] * self.ndim, list(self.shape)
            offsets[self.along], sizes[self.along] = piece.first, piece.size
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        return chunks

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
        piece = next(piece for piece in self.pieces if piece.first == index.offset[self.along])
        return self.part.narrow(self.along, piece.own, piece.size)
