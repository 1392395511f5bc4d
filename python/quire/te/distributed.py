"""transformer_engine.pytorch.distributed: recomputation, and random states by name, for dropout and initialisation that
differ between ranks of a tensor-parallel group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import torch

from quire.nn import recompute


class CudaRNGStatesTracker:
    """States of PyTorch's default generator of the CPU, by name. Pass a function that returns the tracker as
    get_rng_state_tracker to layers."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all states and seeds."""
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Name -> state, as torch.get_rng_state() gives it."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Sets all states to those that get_states() gave."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A state that starts at a seed. Raises RuntimeError for a name or a seed that is there."""
        if name in self._states or seed in self._seeds:
            raise RuntimeError(
                f"CudaRNGStatesTracker.add: name and seed must be new, got {name!r} and {seed}; reset() forgets all"
            )
        self._seeds.add(seed)
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Within this context the default generator has the named state, which goes on; then it has its own again.
        Raises KeyError for a name that was not added."""
        if name not in self._states:
            raise KeyError(f"CudaRNGStatesTracker.fork: {name!r} was not added; add(name, seed) adds it")
        own = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(own)


_OF_CHECKPOINT = {"distribute_saved_activations": False, "get_rng_state_tracker": None, "tp_group": None}


@functools.wraps(recompute.checkpoint)
def checkpoint(function: Callable[..., object], *args: object, use_reentrant: bool = False, **kwargs: object) -> object:
    for name, nothing in _OF_CHECKPOINT.items():
        if kwargs.pop(name, nothing) != nothing:
            raise NotImplementedError(
                f"quire.checkpoint: {name} is not available in this version; leave it {nothing!r}"
            )
    return recompute.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
