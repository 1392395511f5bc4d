"""What tests/pairwise.py leaves of a cross."""

import itertools
import math

import pytest

from pairwise import each_value, pairwise

AXES = [
    ["ab", "cd"],
    ["abc", range(4), "xy"],
    [range(8), "abc", range(6), "xy", "pqr"],
]


def pairs(rows):
    return {frozenset(pair) for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@pytest.mark.parametrize("axes", AXES, ids=len)
def test_no_pair_of_values_is_left_out_and_few_rows_are_more_than_it_takes(axes):
    rows = pairwise(*axes)
    assert pairs(rows) == pairs(itertools.product(*axes))
    least = math.prod(sorted(map(len, axes))[-2:])
    assert least <= len(rows) <= 1.3 * least
    assert rows[0] == tuple(axis[0] for axis in axes) and pairwise(*axes) == rows


def test_a_row_that_may_not_be_is_not_chosen_and_no_pair_that_may_be_is_lost():
    def allowed(a, b, c):
        return not (a == 1 and c == "x")

    axes = [range(4), "abc", "xyz"]
    rows = pairwise(*axes, allowed=allowed)
    assert all(allowed(*row) for row in rows)
    assert pairs(rows) == pairs(row for row in itertools.product(*axes) if allowed(*row))
    assert frozenset({(0, 1), (2, "x")}) not in pairs(rows)


@pytest.mark.parametrize("axes", AXES, ids=len)
def test_no_value_is_left_out_of_the_shortest_rows(axes):
    rows = each_value(*axes)
    assert len(rows) == max(map(len, axes))
    assert [set(column) for column in zip(*rows, strict=True)] == [set(axis) for axis in axes]
