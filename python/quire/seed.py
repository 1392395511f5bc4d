"""Seeds of random streams."""

import torch

from quire.kinds import check_kind


def signed64(value: int, name: str) -> int:
    """The signed integer of the same 64 bits; operators take no others. Raises ValueError out of range, TypeError for
    what is no int."""
    check_kind("quire", int, **{name: value})
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must fit into 64 bits, -2**63 <= {name} < 2**64; got {value}")
    return value - 2**64 if value >= 2**63 else value


def reset_streams(states: list[torch.Tensor]) -> None:
    """Gives random states, int64 [2] {seed, counter}, new seeds and counters of 0.

    Seeds are below 2**63 and taken from torch's default generator without advancing it. Processes of a
    torch.distributed group that start from one torch.manual_seed get different ones; the first rank's are those of a
    single process.
    """
    fork = torch.default_generator.clone_state()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    of_rank = (torch.distributed.get_rank() if distributed else 0) * 0x9E3779B97F4A7C15 % 2**63
    with torch.no_grad():
        for state in states:
            state[:1].copy_(torch.randint(2**63 - 1, (1,), generator=fork, device="cpu") ^ of_rank)
            state[1:].zero_()
