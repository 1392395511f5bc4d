"""Timing on a machine that others use: contenders take turns, the best of each counts, weights come from memory."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")

#: A contender this many times slower than the best one is hopeless.
HOPELESS = 5
#: More than last-level caches hold.
COLD_BYTES = 128 * 2**20


def copies(size: int) -> int:
    """How many things of `size` bytes are cold when their turn comes again; of small ones fewer, as they are many."""
    return min(256, max(2, math.ceil(COLD_BYTES / max(size, 1))))


def cold(first: T, size: int) -> Iterator[T]:
    """Goes round deep copies of `first`, of `size` bytes each."""
    return itertools.cycle([first, *(copy.deepcopy(first) for _ in range(copies(size) - 1))])


def best_seconds(
    calls: Mapping[str, Callable[[], object]], seconds: float, *, least: int = 3, most: int = 200
) -> dict[str, float]:
    """Name -> seconds of its best call. Each is called at least once, at least `least` times if that takes no more than
    `seconds`, then until it has had its share of `seconds`, at most `most` times; and all take turns. A hopeless one is
    called once, unless that took less than a tenth of its share: a first call may be slow for reasons of its own."""
    share = seconds / len(calls)
    best, spent = dict.fromkeys(calls, math.inf), dict.fromkeys(calls, 0.0)
    for turn in range(most):
        limit = seconds if turn < least else share
        slowest = max(HOPELESS * min(best.values(), default=0), share / 10)
        running = [name for name in calls if turn == 0 or (spent[name] < limit and best[name] <= slowest)]
        for name in running:
            begin = time.perf_counter()
            calls[name]()
            took = time.perf_counter() - begin
            best[name], spent[name] = min(best[name], took), spent[name] + took
        if not running:
            break
    return best
