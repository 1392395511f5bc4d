"""What every rank of a group is about to do, compared before it begins. QUIRE_CHECK_RANKS=1 turns it on."""

import contextlib
import itertools
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta

import torch
from torch import distributed

NAME = "QUIRE_CHECK_RANKS"
#: Values of a whole weight that say what it was drawn as.
_VALUES = 64
#: Name of a group -> the numbers of its comparisons to come.
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
_own_draws: ContextVar[bool] = ContextVar("quire_own_draws", default=False)


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
            f"{caller} ({NAME}=1): the ranks of a group must make the same calls in the same order, with the same "
            "shapes, dtypes and recipes, and must draw the same weights: call torch.manual_seed with one seed in all "
            f"of them before the model is made; got {listed}"
        )


@contextlib.contextmanager
def own_draws() -> Iterator[None]:
    """Within it, in this thread, ranks may draw different weights."""
    token = _own_draws.set(True)
    try:
        yield
    finally:
        _own_draws.reset(token)


def note_drawn(weight: torch.Tensor, whole: torch.Tensor) -> None:
    """With QUIRE_CHECK_RANKS=1, remembers what a weight was drawn as, until somebody writes to it.

    whole: the values that every rank has drawn, of which this one keeps the weight; or a part that has a note.
    """
    if not enabled() or _own_draws.get() or weight.is_meta:
        return
    text = drawn(whole)
    if not text:
        values = whole.detach().flatten()[:_VALUES].float().tolist()
        listed = ", ".join(f"{value:.3g}" for value in values[:3])
        text = f", weight drawn as {listed}, ... ({zlib.crc32(repr(values).encode()):08x})"
    weight.quire_drawn = (text, weight._version)


def drawn(weight: torch.Tensor) -> str:
    """The note of note_drawn(); "" if there is none, or the weight was written to."""
    text, version = getattr(weight, "quire_drawn", ("", None))
    return text if version == weight._version else ""


def _has(store: "distributed.Store", key: str, end: float) -> bool:
    """Whether the store has the key before time.monotonic() is `end`."""
    left = end - time.monotonic()
    if left > 0:
        with contextlib.suppress(RuntimeError):  # it timed out
            store.wait([key], timedelta(seconds=left))
    return store.check([key])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of the group"
