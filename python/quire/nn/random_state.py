"""Random states of layers: their seeds, and the values that a checkpoint needs besides state_dict to resume exactly."""

from collections.abc import Mapping, Sequence

import torch

from quire.checks import check_type


def reset_streams(states: Sequence[torch.Tensor], ranks: Sequence[int | None]) -> None:
    """Sets new seeds and counters of 0 in random states, int64 [2] {seed, counter}.

    Seeds are below 2**63 and are derived from torch's default generator without advancing it. Processes of a
    torch.distributed group that start from one torch.manual_seed get different seeds. The first rank gets the same
    seeds as a single process. ranks: as which rank to draw each; None is this process's own.
    """
    fork = torch.default_generator.clone_state()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    own = torch.distributed.get_rank() if distributed else 0
    with torch.no_grad():
        for state, rank in zip(states, ranks, strict=True):
            of_rank = (own if rank is None else rank) * 0x9E3779B97F4A7C15 % 2**63
            state[:1].copy_(torch.randint(2**63 - 1, (1,), generator=fork, device="cpu") ^ of_rank)
            state[1:].zero_()


def _states(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Name -> state, and what its seed is above the one that a single process has."""
    check_type("rng_state", torch.nn.Module, model=model)
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "sr_states"):  # ProductModule, which resets its own by this file
            for product, state in module.sr_states().items():
                found[".".join(filter(None, (name, product)))] = state, module.first_stream()
    return found


def rng_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Module name -> a copy of its int64 [2] {seed, counter}, for every quire layer with matmuls ("" is the model).

    A layer with several matmuls, such as quire.LayerNormMLP, has a name for each: "mlp.fc1", "mlp.fc2". Of a layer
    whose groups are divided over processes (ep_group), the state is that of one process with all groups.
    """
    return {name: _shifted(state, -first) for name, (state, first) in _states(model).items()}


def _shifted(state: torch.Tensor, by: int) -> torch.Tensor:
    return state + state.new_tensor([by, 0])


def set_rng_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Restores the result of rng_state(), on the present devices of the modules.

    Raises ValueError, and changes nothing, unless `state` names exactly the model's layers and every value is an int64
    tensor of shape [2].
    """
    check_type("set_rng_state", Mapping, state=state)
    own = _states(model)
    if missing := sorted(own.keys() - state.keys()):
        raise ValueError(
            f"set_rng_state: the model has layers that the state has not: {', '.join(map(repr, missing))}; pass "
            "what quire.rng_state gave for this model"
        )
    if unexpected := sorted(state.keys() - own.keys()):
        raise ValueError(
            f"set_rng_state: the state has layers that the model has not: {', '.join(map(repr, unexpected))}; pass "
            "what quire.rng_state gave for this model"
        )
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or tuple(value.shape) != (2,):
            what = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"set_rng_state: the state of {name!r} must be an int64 tensor of shape [2], got {what}")
    with torch.no_grad():
        for name, value in state.items():
            state, first = own[name]
            state.copy_(_shifted(value, first))
