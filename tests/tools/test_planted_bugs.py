"""tools/planted_bugs.py: every bug of tests/planted can be planted, and what it says of a run."""

import pytest

import planted_bugs
from planted.bugs import BUGS
from planted.plant import Kernel, Name, Operator


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_planted_bug_has_what_it_changes(bug):
    bug.fault.check()
    assert bug.file().exists()


def test_planted_bugs_have_names_of_their_own():
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize(
    "fault",
    [
        Kernel("no_such_fault"),
        Name("quire:no_such_function", print),
        Name("quire:Linear.no_such_method", print),
        Name("quire:NoSuchClass.forward", print),
        Operator("quire::no_such_operator", "CPU", print),
        Operator("quire::quantize", "XPU", print),
    ],
    ids=str,
)
def test_a_bug_without_what_it_changes_is_an_error(fault):
    with pytest.raises(LookupError, match="no_such|NoSuchClass|XPU"):
        fault.check()


@pytest.mark.parametrize(
    ("status", "output", "said"),
    [
        (0, "3 passed\n", "NOT CAUGHT"),
        (1, "FAILED tests/test_a.py::test_b - assert 0\n1 failed\n", "caught"),
        (1, "ERROR tests/test_a.py::test_b - no fixture\n", "CANNOT TELL"),
        (4, "ERROR: not found: tests/test_a.py\n", "CANNOT TELL"),
        (5, "no tests ran\n", "CANNOT TELL"),
    ],
)
def test_only_a_test_that_failed_has_caught_a_bug(status, output, said):
    assert planted_bugs.verdict(status, output).startswith(said)
