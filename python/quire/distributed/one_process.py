"""Sharded layers that compute what one process computes, to find out whether a difference comes from the sharding."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.distributed.parallel import Parallel
from quire.functional import start_gather


class _Cut(NamedTuple):
    """How a tensor is sharded along dim. pieces: sizes of this rank's pieces, each a part of one of the whole's."""

    parallel: Parallel
    dim: int
    pieces: tuple[int, ...]


class _State(threading.local):
    # Not an attribute of the class: no guard of a graph would see that a thread sets its own.
    def __init__(self) -> None:
        self.on = False


_STATE = _State()


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """A sharded layer that is called within this context gives the bits of one process, in forward and in backward.

    Without it, some results are sums over ranks, whose last bits differ. Within it, every rank gathers the whole
    tensors, computes as one process does, and keeps its shard of the results. This is slow and takes as much memory as
    one process. Use it in tests, and to find out whether a difference comes from the sharding.

    The context holds for calls of this thread. If backward runs the forward pass again (torch.utils.checkpoint), call
    backward within the context too.

    A layer with fuse_wgrad_accumulation or delay_wgrad_compute raises NotImplementedError. Kept codes of weights are
    not used.
    """
    before, _STATE.on = _STATE.on, True
    try:
        yield
    finally:
        _STATE.on = before


def enabled() -> bool:
    """Whether exact() is on in this thread."""
    return _STATE.on


@dataclass(frozen=True)
class Whole:
    """Makes whole tensors of the parts that ranks have, and parts of whole ones, along one sharding.

    parallel: that sharding. place: its place(), on the device of the tensors.
    """

    parallel: Parallel
    place: torch.Tensor

    def weight(self, w: torch.Tensor) -> torch.Tensor:
        """w: [out_features, in_features], or a stack of such."""
        return self._whole(w, -2, self._pieces(w, -2)) if self.parallel.mode == "column" else self._whole(w, -1)

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        return self._whole(bias, -1, self._pieces(bias, -1)) if self.parallel.mode == "column" else bias

    def x(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel.mode == "row":
            return self._whole(x, -1)
        return self.tokens(x)

    def y(self, y: torch.Tensor) -> torch.Tensor:
        """This rank's shard of y."""
        if self.parallel.mode == "row":
            return self.own_tokens(y)
        wholes = self.parallel.parts or (y.shape[-1],)
        return self._own(y, -1, tuple(size // self.parallel.size for size in wholes))

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """x of all ranks, where each has some tokens."""
        return self._whole(x, 0) if self.parallel.sequence else x

    def own_tokens(self, y: torch.Tensor) -> torch.Tensor:
        """The tokens of y that this rank has."""
        return self._own(y, 0, (y.shape[0] // self.parallel.size,)) if self.parallel.sequence else y

    def _pieces(self, t: torch.Tensor, dim: int) -> tuple[int, ...]:
        return tuple(part // self.parallel.size for part in self.parallel.parts) or (t.shape[dim],)

    def _whole(self, t: torch.Tensor, dim: int, pieces: tuple[int, ...] = ()) -> torch.Tensor:
        return _Whole.apply(t, self.place, _Cut(self.parallel, dim, pieces or (t.shape[dim],)))

    def _own(self, t: torch.Tensor, dim: int, pieces: tuple[int, ...]) -> torch.Tensor:
        return _Own.apply(t, self.place, _Cut(self.parallel, dim, pieces))


def _gathered(t: torch.Tensor, cut: _Cut) -> torch.Tensor:
    parallel, dim, pieces = cut
    own = t.movedim(dim, 0).contiguous()
    gathered = start_gather(own, parallel.size, parallel.group)
    of_ranks = torch.ops._c10d_functional.wait_tensor(gathered).unflatten(0, (parallel.size, own.shape[0]))
    whole = torch.cat([piece.flatten(0, 1) for piece in of_ranks.split(pieces, 1)])
    return _moved(whole, dim)


def _part(t: torch.Tensor, place: torch.Tensor, cut: _Cut) -> torch.Tensor:
    parallel, dim, pieces = cut
    wholes = t.movedim(dim, 0).split([parallel.size * piece for piece in pieces])
    # By a tensor: a number would make graphs of ranks differ.
    each = [
        whole.unflatten(0, (parallel.size, piece)).index_select(0, place[:1]).squeeze(0)
        for whole, piece in zip(wholes, pieces, strict=True)
    ]
    return _moved(torch.cat(each), dim)


def _moved(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Contiguous, with dimension 0 of t as dimension dim."""
    moved = t.movedim(0, dim)
    # contiguous() returns the same tensor then. A compiled autograd.Function whose forward ends with an operator that
    # does that has a gradient of 0 with PyTorch 2.11.
    return moved if moved.is_contiguous() else moved.contiguous()


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, place, cut):
        ctx.save_for_backward(place)
        ctx.cut = cut
        return _gathered(t, cut)

    @staticmethod
    def backward(ctx, grad):
        return _part(grad, *ctx.saved_tensors, ctx.cut), None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, place, cut):
        ctx.cut = cut
        return _part(t, place, cut)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.cut), None, None
