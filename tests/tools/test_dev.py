"""./dev hands arguments on to what it runs."""

import pytest

import dev


@pytest.mark.parametrize(
    ("given", "script", "rest"),
    [
        ([], "benchmarks/bench.py", []),
        (["--m", "1", "16"], "benchmarks/bench.py", ["--m", "1", "16"]),
        (["encoder", "--batch", "5"], "examples/encoder/run.py", ["--batch", "5"]),
        (["host"], "benchmarks/host.py", []),
        (["host", "--rounds", "3"], "benchmarks/host.py", ["--rounds", "3"]),
    ],
)
def test_bench_takes_the_name_of_a_benchmark(monkeypatch, given, script, rest):
    ran = []
    monkeypatch.setattr(dev, "script", lambda *call: ran.append(call))
    verb, arguments = dev.parse(["bench", *given])
    assert verb.verb == "bench"
    dev.bench(arguments)
    assert ran == [(script, rest)]
    assert (dev.ROOT / script).exists()
