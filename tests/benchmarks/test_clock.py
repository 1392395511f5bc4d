"""How often the clock of the benchmarks calls contenders."""

import pytest

import clock
from clock import best_seconds


class Hours:
    """Time that passes only by sleeping, so that a busy machine changes nothing."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def time(monkeypatch):
    monkeypatch.setattr(clock, "time", hours := Hours())
    return hours


def counted(seconds, log, name, time):
    def call():
        log.append(name)
        time.sleep(seconds)

    return call


def test_a_hopeless_contender_is_not_called_again(time):
    log = []
    calls = {name: counted(s, log, name, time) for name, s in {"quick": 0.01, "fair": 0.045, "hopeless": 0.055}.items()}
    best = best_seconds(calls, 0.3)
    assert log.count("hopeless") == 1 and best["hopeless"] >= 0.055
    assert log.count("quick") >= 3 and log.count("fair") >= 3


def test_a_slow_first_call_does_not_make_a_contender_hopeless(time):
    log = []
    first = iter([0.02])
    calls = {
        "quick": counted(0.001, log, "quick", time),
        "warming": lambda: log.append("w") or time.sleep(next(first, 0.001)),
    }
    best_seconds(calls, 1, most=10)
    assert log.count("w") == 10
