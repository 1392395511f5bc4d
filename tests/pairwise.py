"""Crosses of parameters, thinned, for tests of compositions whose parts have tests of their own."""

import itertools
from collections.abc import Callable, Sequence


def pairwise(*axes: Sequence, allowed: Callable[..., bool] = lambda *row: True) -> list[tuple]:
    """Rows with one value of each axis, such that any two values of two axes that may meet do so in one of them.

    allowed: whether a row may be. The rows depend on the arguments alone, the first is the first that is allowed.
    """
    candidates = [
        indices
        for indices in itertools.product(*(range(len(axis)) for axis in axes))
        if allowed(*(axis[index] for axis, index in zip(axes, indices, strict=True)))
    ]
    pairs = {row: frozenset(itertools.combinations(enumerate(row), 2)) for row in candidates}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(candidates, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return [tuple(axis[index] for axis, index in zip(axes, row, strict=True)) for row in chosen]


def each_value(*axes: Sequence) -> list[tuple]:
    """As many rows as the longest axis has values, with every value of each axis in one, as evenly as it goes."""
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))]
