"""The operators that keep the state of delayed scaling (numerics.md 1.4-1.6), against golden vectors."""

import pytest
import torch

pytestmark = pytest.mark.any_device

OPS = torch.ops.quire


def table(*rules):
    """Rows {number, length, most_recent, margin, largest forward, largest backward}, as many as a thread has."""
    rows = torch.zeros(8, 6, dtype=torch.float64)
    for row, rule in zip(rows, rules, strict=False):
        row.copy_(torch.tensor(rule, dtype=torch.float64))
    return rows


def state(length=4, slots=3, rule=7):
    usage = torch.tensor([rule, 0, 0])
    return torch.zeros(length, slots), torch.ones(slots), torch.zeros(slots), usage


def update(states, rules, backward=False, reduced=()):
    history, scale, amax, usage = (list(tensors) for tensors in zip(*states, strict=True))
    OPS.delayed_update_(history, scale, amax, usage, list(reduced), rules, backward)


def collect(amax, *values):
    given = [None if value is None else torch.tensor([value]) for value in values]
    usage = torch.tensor([0, 5, 6])
    OPS.delayed_collect_(amax, usage, torch.tensor(7), *given)
    assert usage.tolist() == [7, 5, 6]


def read(case, name, step):
    return torch.tensor(case[name][step])


def test_sequences_of_updates_are_golden_and_states_do_not_touch_each_other(golden, equal_bits):
    cases = list(golden.cases("delayed"))
    assert len(cases) > 4
    for case in cases:
        s = case.spec
        length, newest = s["history_len"], s["algo"] == "most_recent"
        backward = s["fp8_max"] == 57344
        rules = table((3, 9, 0, 0, 1, 1), (7, length, newest, s["margin"], 448, 57344), (8, length, 1, 0, 448, 57344))
        entry, other = state(length + 2), state(length, slots=2, rule=8)
        for step in range(len(case["step_amax"])):
            entry[2].copy_(torch.fmax(entry[2], read(case, "step_amax", step)))
            other[2].fill_(2.0**step)
            reduced = [other[2].clone(), read(case, "reduced_amax", step)] if s["reduced"] else []
            update([other, entry], rules, backward, reduced)
            expected = read(case, "history_after", step)
            assert equal_bits(entry[0][:length], expected) and equal_bits(entry[2], expected[0]), (case.id, step)
            assert equal_bits(entry[1], read(case, "scale_after", step)), (case.id, step)
            assert other[1].tolist() == [s["fp8_max"] / 2.0**step] * 2


def test_amaxes_are_collected_by_maximum_and_nan_is_ignored():
    amax = torch.tensor([1.0, 2.0, 5.0])
    collect(amax, 3.0, None)
    assert amax.tolist() == [3, 2, 5]
    collect(amax, 0.5, 4.0)
    collect(amax, float("nan"), float("nan"))
    assert amax.tolist() == [3, 4, 5]
    collect(amax, float("inf"), 0.0)
    assert amax.tolist() == [float("inf"), 4, 5]
    assert amax._version == 0, "a forward may be between another forward and its backward"


def test_only_states_whose_rule_is_in_the_table_are_updated():
    own, foreign, new = state(), state(rule=8), state(rule=0)
    for _, _, amax, _ in (own, foreign, new):
        amax.fill_(7.0)
    update([own, foreign, new], table((7, 4, 0, 0, 448, 57344)))
    assert own[1].tolist() == [64] * 3 and own[2].tolist() == [0] * 3 and own[0][3].tolist() == [7] * 3
    for history, scale, amax, usage in (foreign, new):
        assert scale.tolist() == [1] * 3 and amax.tolist() == [7] * 3 and not history.any() and not usage[1:].any()


def test_rows_beyond_the_length_are_cut_off_and_come_back_as_zeros():
    history, scale, amax, usage = state(8, 1)
    usage[2] = 6
    history[1:6, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    amax[0] = 0.5
    update([(history, scale, amax, usage)], table((7, 3, 0, 0, 1, 448)), backward=True)
    assert history[:, 0].tolist() == [0, 2, 0.5, 0, 0, 0, 0, 0]  # [0, 1, 2] were left, and 2 is the largest
    assert scale == 224 and usage.tolist() == [7, 0, 3]
    amax[0] = 0.25
    update([(history, scale, amax, usage)], table((7, 6, 0, 0, 1, 448)), backward=True)
    assert history[:, 0].tolist() == [0, 0.5, 0, 0, 0, 0.25, 0, 0] and scale == 224 and usage.tolist() == [7, 0, 6]


def wrong_updates():
    h, s, a, u = state()
    rules, vector, no = table((7, 4, 0, 0, 448, 57344)), torch.zeros(3), torch.zeros(3)
    return [
        ("one entry a state", ([h], [s, s], [a], [u], [], rules, False)),
        ("one entry a state", ([h], [s], [a], [u], [vector] * 2, rules, False)),
        ("one entry a state", ([h], [s], [a], [], [], rules, False)),
        ("rules must be a contiguous float64 table of 6 columns", ([h], [s], [a], [u], [], rules[:, :5], False)),
        ("rules must be a contiguous float64 table", ([h], [s], [a], [u], [], rules.float(), False)),
        ("length must be from 1 to the rows of the history, 4; got 5", ([h], [s], [a], [u], [], rules + 1, False)),
        ("length must be from 1", ([h], [s], [a], [u], [], table((7, 0, 0, 0, 448, 57344)), False)),
        ("scale must be contiguous float32", ([h], [torch.ones(2)], [a], [u], [], rules, False)),
        ("amax must be contiguous float32", ([h], [s], [a.double()], [u], [], rules, False)),
        ("usage must be contiguous int64 of size", ([h], [s], [a], [u[:1]], [], rules, False)),
        ("reduced must be contiguous", ([h], [s], [a], [u], [torch.zeros(6)[::2]], rules, False)),
        ("a history must be a contiguous float32 matrix", ([h, h.t()], [s, s], [a, a], [u, u], [], rules, False)),
        ("usage must be", ([h, h], [s, s], [a, a], [u, no], [], rules, False)),  # the first one must not change
    ]


@pytest.mark.parametrize("number", range(13))
def test_a_wrong_update_is_refused_in_words_and_changes_nothing(number):
    words, arguments = wrong_updates()[number]
    if arguments[3]:
        arguments[3][0][0] = 8 if "got 5" in words else 7  # all of `rules` is one more there
    arguments[2][0].fill_(3.0)
    before = [t.clone() for tensors in arguments[:4] for t in tensors]
    with pytest.raises(RuntimeError, match=f"delayed_update_: .*{words}"):
        OPS.delayed_update_(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, [t for ts in arguments[:4] for t in ts], strict=True))


@pytest.mark.parametrize(
    "words, position, wrong_size",
    [
        ("amax must be a contiguous float32 vector", 0, 1),
        ("usage must be contiguous int64", 1, 3),
        ("rule must be an int64 scalar", 2, 2),
        ("x_amax must be contiguous float32", 3, 2),
        ("w_amax must be contiguous float32", 4, 0),
    ],
)
def test_a_wrong_collection_is_refused_in_words_and_changes_nothing(words, position, wrong_size):
    amax, usage = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    arguments = [amax, usage, torch.tensor(7), torch.ones(1), torch.ones(1)]
    arguments[position] = torch.ones(wrong_size)
    with pytest.raises(RuntimeError, match=f"delayed_collect_: {words}"):
        OPS.delayed_collect_(*arguments)
    assert not amax.any() and not usage.any()
