"""The blocks of a model, each of which is fed the result of the one before, and what each is called with."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from quire.nn.own_context import callers_device
from quire.quantization.inputs import Batch, arguments

#: The method by which a cache of keys and values is known, of transformers: blocks write to it.
_OF_A_CACHE = "get_seq_length"


class Stop(Exception):
    """Ends a call of a model when all that was wanted has been seen."""


@dataclass
class BlockCall:
    """One call of a block: its first argument is what flows from block to block; the others are kept."""

    others: tuple[object, ...]
    named: dict[str, object]

    def run(self, block: torch.nn.Module, flowing: torch.Tensor) -> torch.Tensor:
        with callers_device():
            return first_tensor(block(flowing, *self.others, **self.named))


@dataclass
class Chain:
    """blocks: in the order of calls. calls: of each block, one for each batch. inputs: of the first block."""

    blocks: list[torch.nn.Module]
    calls: list[list[BlockCall]] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)


def first_tensor(result: object) -> object:
    """A block returns what flows on, or a tuple that begins with it."""
    return result[0] if isinstance(result, tuple | list) and result else result


def run(model: torch.nn.Module, batch: Batch) -> None:
    args, named = arguments(batch)
    with contextlib.suppress(Stop), callers_device():
        model(*args, **named)


def find_chain(model: torch.nn.Module, batches: Sequence[Batch], layers: set[torch.nn.Module]) -> Chain | None:
    """The list of modules with the most of `layers` that call each other's results, once each and in order. None if
    there is none, such as where blocks are called twice or take the results of several others."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.Sequential) and len(m) > 1]
    lists.sort(key=lambda m: -len(layers.intersection(m.modules())))
    for modules in lists:
        if layers.intersection(modules.modules()) and (chain := _recorded(model, list(modules), batches)):
            return chain
    return None


def _recorded(model: torch.nn.Module, blocks: list[torch.nn.Module], batches: Sequence[Batch]) -> Chain | None:
    """The chain of these blocks, or None if they are none. Runs the model on every batch."""
    chain = Chain(blocks, [[] for _ in blocks])
    for number, batch in enumerate(batches):
        with _recording(chain) as order:
            run(model, batch)
        if order != list(range(len(blocks))) or any(len(calls) != number + 1 for calls in chain.calls):
            return None
    return chain


def _kept(argument: object) -> object:
    """An argument for further calls of a block: no cache, which would have the tokens several times."""
    return None if hasattr(argument, _OF_A_CACHE) else argument


@contextlib.contextmanager
def _recording(chain: Chain) -> Iterator[list[int]]:
    """Adds the calls of one run of the model. Gives the numbers of blocks in the order of calls; -1 for a call that
    does not take the result of the block before."""
    order: list[int] = []
    before: list[object] = [None]

    def enter(index: int) -> Callable:
        def hook(block: torch.nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
            fits = bool(args) and isinstance(args[0], torch.Tensor) and (index == 0 or args[0] is before[0])
            order.append(index if fits else -1)
            if fits:
                kept = {name: _kept(value) for name, value in named.items()}
                chain.calls[index].append(BlockCall(tuple(_kept(value) for value in args[1:]), kept))
                if index == 0:
                    chain.inputs.append(args[0].detach())

        return hook

    def leave(block: torch.nn.Module, args: object, result: object) -> None:
        before[0] = first_tensor(result)

    handles = []
    for index, block in enumerate(chain.blocks):
        handles.append(block.register_forward_pre_hook(enter(index), with_kwargs=True))
        handles.append(block.register_forward_hook(leave))
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()
