"""The fuzzer of operators (tests/fuzz). ./dev test tests/quire_torch --fuzz-seconds 3600 --fuzz-seed 7"""

import os

import pytest

from fuzz.run import fuzz

pytestmark = pytest.mark.slow


def test_no_call_of_an_operator_ends_the_process_or_writes_when_refused_or_leaves_a_result_unwritten(request):
    option = request.config.getoption
    count, failures = fuzz(option("--fuzz-seconds"), option("--fuzz-seed"))
    assert count > 0 and not failures, "\n".join(failures)


@pytest.mark.parametrize(
    "only, faults",
    [
        ("planted_ends", ["the process ended with SIGABRT\tquire.planted_ends"]),
        ("planted_hollow", ["the process ended with SIGABRT\tquire.planted_hollow_ends"]),
        ("planted_dtype", ["\tquire.planted_dtype_ends"]),
        (
            "planted_quiet",
            [
                "a refused call has written: refused\tquire.planted_quiet_writes_.",
                "a refused call has written: refused\tquire.planted_quiet_writes_first_",
                "stray words: INTERNAL ASSERT",
                "no sentence but KeyError",
            ],
        ),
        pytest.param(
            "planted_quiet",
            ["a result is not written, or not by its arguments alone\tquire.planted_quiet_leaves_out"],
            marks=pytest.mark.skipif(
                "QUIRE_FUZZ_SANITIZED" in os.environ, reason="the sanitizer's allocator fills memory with one byte"
            ),
        ),
    ],
)
def test_the_fuzzer_does_not_miss_operators_with_faults(only, faults):
    _, failures = fuzz(2, 0, only)
    assert all(any(fault in failure for failure in failures) for fault in faults), "\n".join(failures)
