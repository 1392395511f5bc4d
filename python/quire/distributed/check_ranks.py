"""What every process of a group is about to do, compared before it begins. QUIRE_CHECK_RANKS=1 turns it on."""

import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import distributed

NAME = "QUIRE_CHECK_RANKS"
#: Name of a group -> the numbers of its comparisons to come.
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)


def enabled() -> bool:
    """Whether the environment has QUIRE_CHECK_RANKS=1. Raises ValueError for another value than 0, 1 and ''."""
    value = os.environ.get(NAME, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{NAME} must be 0 or 1, got {value!r}")
    return value == "1"


def run_eagerly() -> None:
    """Compiled functions run eagerly from now on, because a compiled one compares nothing."""
    torch.compiler.set_stance("force_eager")


def check_ranks(caller: str, what: str, group: "distributed.ProcessGroup", device: torch.device) -> None:
    """Returns when every rank of the group has come here with the same `what`. It uses the group's store, and not a
    collective: so it can name the ranks that do not come.

    caller: who asks, for errors. Raises RuntimeError, on every rank, if one has another `what`; and on those that came,
    if one does not come within the timeout of the group.
    """
    store = distributed.distributed_c10d._get_process_group_store(group)
    own, number = distributed.get_rank(group), next(_numbers[group.group_name])
    keys = [f"quire:check/{number}/{rank}" for rank in range(group.size())]
    store.set(keys[own], what)
    timeout = group._get_backend(device).options._timeout
    end = time.monotonic() + timeout.total_seconds()
    missing = [rank for rank, key in enumerate(keys) if not _has(store, key, end)]
    if missing:
        raise RuntimeError(
            f"{caller} ({NAME}=1): {_ranks(missing)} did not come to this call within {timeout.total_seconds():g} "
            f"seconds. It ended, it hangs, or it leaves out a call that the others make. The call here: {what}"
        )
    said = [store.get(key).decode() for key in keys]
    if number:  # every rank that is here has read what was said before
        store.delete_key(f"quire:check/{number - 1}/{own}")
    if len(set(said)) > 1:
        by_text = {text: [rank for rank, other in enumerate(said) if other == text] for text in said}
        listed = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in by_text.items())
        raise RuntimeError(
            f"{caller} ({NAME}=1): the processes of a group must make the same calls in the same order, with the same "
            f"shapes, dtypes and recipes; got {listed}"
        )


def _has(store: "distributed.Store", key: str, end: float) -> bool:
    """Whether the store has the key before time.monotonic() is `end`."""
    left = end - time.monotonic()
    if left > 0:
        with contextlib.suppress(RuntimeError):  # it timed out
            store.wait([key], timedelta(seconds=left))
    return store.check([key])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of the group"
