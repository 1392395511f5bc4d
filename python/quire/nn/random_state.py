"""Random states of layers: their seeds, and the values that a checkpoint needs besides state_dict to resume exactly."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from quire.checks import check_names, check_type, is_plain, received
from quire.loading.devices import HOST, generator_state


def reset_streams(states: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
    """Sets new seeds and counters of 0 in random states, int64 [2] {seed, counter}.

    Seeds are below 2**63 and are derived from torch's default generator and that of the states' device without
    advancing either, and from a data-parallel rank for each: ranks that start from one torch.manual_seed get different
    seeds for different ranks. Rank 0 gets the seeds of a single process.
    """
    fork = torch.default_generator.clone_state()
    with torch.no_grad():
        for state, rank in zip(states, ranks, strict=True):
            state[:1].copy_(
                torch.randint(2**63 - 1, (1,), generator=fork, dtype=torch.int64, device=HOST)
                ^ _of_rank(rank)
                ^ _of_device(state.device)
            )
            state[1:].zero_()


def _of_rank(rank: int) -> int:
    """What the seed of a data-parallel rank differs by from that of rank 0."""
    return rank * 0x9E3779B97F4A7C15 % 2**63


def _of_device(device: torch.device) -> int:
    """What a seed differs by on an accelerator, where initial weights are drawn from a generator of its own: without it
    all layers that are made there would have one seed."""
    drawn_from = generator_state(device)
    return int.from_bytes(hashlib.sha256(drawn_from).digest()[:8], "little") % 2**63 if drawn_from else 0


def own_rank() -> int:
    """The rank in torch.distributed's default group; 0 without one."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Name, layer and random state, of each matmul."""
    check_type("rng_state", torch.nn.Module, model=model)
    for name, module in model.named_modules():
        if hasattr(module, "sr_states"):  # ProductModule, which resets its own by this file
            for product, state in module.sr_states().items():
                yield ".".join(filter(None, (name, product))), module, state


def rng_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Module name -> a copy of its int64 [2] {seed, counter}, for every quire layer with matmuls ("" is the model).

    A layer with several matmuls, such as quire.LayerNormMLP, has a name for each: "mlp.fc1", "mlp.fc2". If the
    groups of a layer are sharded over ranks (ep_group), the state is the same as in one process with all groups.

    Args:
        model: a model with layers of quire.
    """
    return {name: _shifted(state, -module.first_stream()) for name, module, state in _layers(model)}


def _shifted(state: torch.Tensor, by: int) -> torch.Tensor:
    return state + state.new_tensor([by, 0])


def set_rng_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Restores the result of rng_state(), on the present devices of the modules.

    Args:
        model: the same model, or one with layers of the same names.
        state: the result of `rng_state`.

    Raises:
        TypeError: for a model or a state of another type.
        ValueError: unless `state` names exactly the model's layers and every value is an int64 tensor of shape [2] that
            has values. Nothing has then changed.
    """
    check_rng_state("set_rng_state", "pass what quire.rng_state gave for this model", model, state)
    with torch.no_grad():
        for name, module, own in _layers(model):
            own.copy_(_shifted(state[name], module.first_stream()))


def check_rng_state(what: str, remedy: str, model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Raises the errors of set_rng_state(). what: the operation that takes the state."""
    check_type(what, torch.nn.Module, model=model)
    check_type(what, Mapping, state=state)
    layers = {layer: own for layer, _, own in _layers(model)}
    check_names(what, remedy, state, layers, all_of_them=True)
    for name, value in state.items():
        if not is_plain(value, torch.int64, may_be_meta=layers[name].is_meta) or tuple(value.shape) != (2,):
            raise ValueError(
                f"{what}: the random state of {name!r} must have values and be dense int64 of shape [2], got "
                f"{received(value)}; {remedy}"
            )


def seeds_of_rank_0(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """rng_state() of the process whose data-parallel rank is 0, without a message: seeds of ranks follow from it."""
    state = rng_state(model)
    return {name: _moved(state[name], module.stream) for name, module, _ in _layers(model)}


def of_own_rank(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What set_rng_state() needs in this rank, of what seeds_of_rank_0() gave in any."""
    streams = {name: module.stream for name, module, _ in _layers(model)}
    return {name: _moved(value, streams.get(name, 0)) for name, value in state.items()}


def _moved(state: torch.Tensor, rank: int) -> torch.Tensor:
    """Between a data-parallel rank and rank 0, in either direction."""
    return torch.stack([state[0] ^ _of_rank(rank), state[1]])
