"""The operators that keep the state of delayed scaling (numerics.md 1.4-1.6), against golden vectors."""

import pytest
import torch

OPS = torch.ops.quire
RULE = torch.tensor(7)


def state(length=4, slots=3):
    return torch.zeros(length, slots), torch.ones(slots), torch.zeros(slots)


def update(states, largest, length, *, reduced=(), algorithm="max", margin=0, rules=None):
    history, scale, amax = (list(tensors) for tensors in zip(*states, strict=True))
    rules = [RULE.clone() for _ in states] if rules is None else rules
    OPS.delayed_update_(history, scale, amax, list(reduced), rules, RULE, largest, length, algorithm, margin)


def collect(amax, *values, rule=None):
    given = [None if value is None else torch.tensor([value]) for value in values]
    OPS.delayed_collect_(amax, torch.tensor(0) if rule is None else rule, RULE, *given)


def read(case, name, step):
    return torch.from_numpy(case[name][step].copy())


def test_sequences_of_updates_are_golden_and_states_do_not_touch_each_other(golden, equal_bits):
    cases = list(golden.cases("delayed"))
    assert len(cases) > 4
    for case in cases:
        s = case.spec
        entry, other = state(s["history_len"]), state(s["history_len"], slots=2)
        for step in range(len(case["step_amax"])):
            entry[2].copy_(torch.fmax(entry[2], read(case, "step_amax", step)))
            other[2].fill_(2.0**step)
            reduced = [read(case, "reduced_amax", step), other[2].clone()] if s["reduced"] else []
            options = {"algorithm": s["algo"], "margin": s["margin"]}
            update([other, entry], [57344.0, s["fp8_max"]], s["history_len"], reduced=reduced[::-1], **options)
            expected = read(case, "history_after", step)
            assert equal_bits(entry[0], expected) and equal_bits(entry[2], expected[0]), f"{case.id}, step {step}"
            assert equal_bits(entry[1], read(case, "scale_after", step)), f"{case.id}, step {step}"
            assert torch.equal(other[1], torch.full((2,), 57344.0 / 2.0 ** (s["margin"] + step)))


def test_amaxes_are_collected_by_maximum_and_nan_is_ignored():
    amax, rule = torch.tensor([1.0, 2.0, 5.0]), torch.tensor(0)
    collect(amax, 3.0, None, rule=rule)
    assert amax.tolist() == [3, 2, 5] and rule == RULE
    collect(amax, 0.5, 4.0)
    collect(amax, float("nan"), float("nan"))
    assert amax.tolist() == [3, 4, 5]
    collect(amax, float("inf"), 0.0)
    assert amax.tolist() == [float("inf"), 4, 5]
    assert amax._version == 0, "a forward may be between another forward and its backward"


def test_only_states_of_the_rule_are_updated():
    own, foreign = state(), state()
    for _, _, amax in (own, foreign):
        amax.fill_(7.0)
    update([own, foreign], [448.0, 448.0], 4, rules=[RULE.clone(), torch.tensor(8)])
    assert own[1].tolist() == [64] * 3 and own[2].tolist() == [0] * 3 and own[0][3].tolist() == [7] * 3
    assert foreign[1].tolist() == [1] * 3 and foreign[2].tolist() == [7] * 3 and not foreign[0].any()


def test_rows_beyond_the_length_are_cut_off_and_come_back_as_zeros():
    history, scale, amax = state(6, 1)
    history[1:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    amax[0] = 0.5
    update([(history, scale, amax)], [448.0], 3)  # [0, 1, 2] are left, 2 is the largest of 0.5, 1, 2
    assert history[:, 0].tolist() == [0, 2, 0.5, 0, 0, 0] and scale == 224
    amax[0] = 0.25
    update([(history, scale, amax)], [448.0], 6)
    assert history[:, 0].tolist() == [0, 0.5, 0, 0, 0, 0.25] and scale == 224


def wrong_updates():
    h, s, a = state()
    rules, vector = [RULE], torch.zeros(3)
    yield "one entry a state", ([h], [s, s], [a], [], rules, RULE, [448.0], 4, "max", 0)
    yield "one entry a state", ([h], [s], [a], [vector] * 2, rules, RULE, [448.0], 4, "max", 0)
    yield "one entry a state", ([h], [s], [a], [], rules, RULE, [], 4, "max", 0)
    yield "algorithm must be 'max' or 'most_recent', got 'mean'", ([h], [s], [a], [], rules, RULE, [1.0], 4, "mean", 0)
    yield "length must be at least 1, got 0", ([h], [s], [a], [], rules, RULE, [448.0], 0, "max", 0)
    yield "margin must be between", ([h], [s], [a], [], rules, RULE, [448.0], 4, "max", 2**40)
    yield "at least length = 5 rows", ([h], [s], [a], [], rules, RULE, [448.0], 5, "max", 0)
    yield "scale must be contiguous float32", ([h], [torch.ones(2)], [a], [], rules, RULE, [448.0], 4, "max", 0)
    yield "amax must be contiguous float32", ([h], [s], [a.double()], [], rules, RULE, [448.0], 4, "max", 0)
    yield "reduced must be contiguous", ([h], [s], [a], [torch.zeros(6)[::2]], rules, RULE, [448.0], 4, "max", 0)
    yield "rule must be an int64 scalar", ([h], [s], [a], [], rules, vector, [448.0], 4, "max", 0)
    yield "state_rule must be an int64 scalar", ([h], [s], [a], [], [vector], RULE, [448.0], 4, "max", 0)
    good, bad = ([h, h], [s, s], [a, a], [], [RULE, vector], RULE, [448.0] * 2, 4, "max", 0), "state_rule must be"
    yield bad, good  # the second entry is wrong: the first must not have changed


@pytest.mark.parametrize("words, arguments", list(wrong_updates()), ids=lambda v: v if isinstance(v, str) else "")
def test_a_wrong_update_is_refused_in_words_and_changes_nothing(words, arguments):
    arguments[2][0].fill_(3.0) if arguments[2][0].dtype == torch.float32 else None
    before = [t.clone() for tensors in arguments[:3] for t in tensors]
    with pytest.raises(RuntimeError, match=f"delayed_update_: .*{words}"):
        OPS.delayed_update_(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, [t for ts in arguments[:3] for t in ts], strict=True))


@pytest.mark.parametrize(
    "words, arguments",
    [
        ("amax must be a contiguous float32 vector", (torch.zeros(1), torch.tensor(0), RULE, torch.ones(1), None)),
        ("state_rule must be an int64", (torch.zeros(3), torch.zeros(1), RULE, torch.ones(1), None)),
        ("rule must be an int64", (torch.zeros(3), torch.tensor(0), torch.ones(2), torch.ones(1), None)),
        ("x_amax must be contiguous float32", (torch.zeros(3), torch.tensor(0), RULE, torch.ones(2), None)),
        ("w_amax must be contiguous float32", (torch.zeros(3), torch.tensor(0), RULE, torch.ones(1), torch.ones(0))),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_collection_is_refused_in_words_and_changes_nothing(words, arguments):
    with pytest.raises(RuntimeError, match=f"delayed_collect_: {words}"):
        OPS.delayed_collect_(*arguments)
    assert not arguments[0].any() and not arguments[1].any()
