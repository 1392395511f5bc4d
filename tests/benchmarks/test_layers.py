"""The benchmark of layers: contenders compute what they say, take turns, run cold; cliffs are found; it runs."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capped
import clock
import contenders
import machine
import sweep

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench.py"


@pytest.fixture
def time(monkeypatch):
    """time.now, in seconds, which passes only where a test says so."""

    class Time:
        now = 0.0

    monkeypatch.setattr(clock.time, "perf_counter", lambda: Time.now)
    return Time


def taking(time, log, name, *seconds):
    seconds = list(seconds)

    def call():
        log.append(name)
        time.now += seconds.pop(0) if len(seconds) > 1 else seconds[0]

    return call


def test_contenders_take_turns_and_the_best_call_counts(time):
    log = []
    calls = {"a": taking(time, log, "a", 3, 1, 2), "b": taking(time, log, "b", 5, 5, 4)}
    assert clock.best_seconds(calls, 12, least=3) == {"a": 1, "b": 4}
    assert log == ["a", "b"] * 3


def test_a_contender_that_takes_all_the_time_is_called_once(time):
    log = []
    calls = {"quick": taking(time, log, "quick", 1), "slow": taking(time, log, "slow", 100)}
    assert clock.best_seconds(calls, 10, least=3) == {"quick": 1, "slow": 100}
    assert log.count("slow") == 1


def test_quick_contenders_run_more_often_until_each_has_had_its_share(time):
    log = []
    calls = {"quick": taking(time, log, "quick", 1), "slow": taking(time, log, "slow", 5)}
    clock.best_seconds(calls, 40, least=1, most=15)
    assert [log.count(name) for name in calls] == [15, 4]


@pytest.fixture
def warm(monkeypatch):
    """Few copies of weights, for tests that time nothing."""
    monkeypatch.setattr(clock, "COLD_BYTES", 0)


def test_what_is_cold_comes_round_after_more_than_caches_hold():
    size = 40 * 2**20
    weights = clock.cold(torch.zeros(size // 4), size)
    first = [next(weights) for _ in range(4)]
    assert next(weights) is first[0] and len({w.data_ptr() for w in first}) == 4


@pytest.mark.parametrize("weights", ["quantized", "kept"])
def test_every_contender_computes_the_product(weights, warm):
    torch.manual_seed(1)
    x, w = torch.randn(16, 128), torch.randn(64, 128)
    exact = x.double() @ w.double().T
    for contender in contenders.make(w, weights):
        y = contender.inference(x)()
        y = y if isinstance(y, torch.Tensor) else y.result()  # ggml's
        error = (y.double() - exact).norm() / exact.norm()
        low, high = (0.03, 0.2) if contender.name.endswith("fp4") else (0, 0.06)
        assert low <= error <= high, f"{contender.name}: {error}"


def test_a_peer_that_does_not_take_the_sizes_is_left_out_in_words(warm):
    assert set(contenders.peers_that_lack(7, 100)) == set(contenders.MULTIPLES)
    x = torch.randn(3, 100)
    for contender in contenders.make(torch.randn(7, 100), "quantized"):
        assert contender.inference(x)().shape == (3, 7)
        assert [t.shape for t in contender.training(x)()] == [(3, 100), (7, 100)]


def test_training_computes_the_gradients(warm):
    torch.manual_seed(1)
    x, w = torch.randn(32, 128), torch.randn(64, 128)
    for contender in contenders.make(w, "quantized"):
        call = contender.training(x)
        if call is None:
            assert contender.name.startswith(("ggml", "torch _scaled_mm"))
            continue
        dx, dw = call()
        assert dx.shape == x.shape and dw.shape == w.shape and dx.isfinite().all() and dw.isfinite().all()
        assert dw.norm() > 0


def test_the_roof_is_of_the_arithmetic_that_formats_allow(warm):
    peaks = machine.Peaks(float32=10, bfloat16=20, int8=80, read=5, copy=4)
    assert [peaks.flops(kind) for kind in ("float32", "bfloat16", "int8")] == [10, 20, 80]
    assert peaks.least_seconds(160, 1, "int8") == 2 and peaks.least_seconds(160, 50, "int8") == 10
    without = machine.Peaks(float32=10, bfloat16=2, int8=0, read=5, copy=4)  # no instructions for either
    assert [without.flops(kind) for kind in ("bfloat16", "int8")] == [10, 10]
    assert without.best(peaks) == machine.Peaks(10, 20, 80, 5, 4)
    made = contenders.make(torch.randn(64, 128), "quantized")
    kinds = {contender.name: contender.arithmetic for contender in made}
    assert [kinds[f"quire {name}"] for name in ("mxfp8", "nvfp4")] == ["bfloat16", "int8"]
    assert [kinds[f"torch {name}"] for name in ("float32", "bfloat16")] == ["float32", "bfloat16"]


def test_what_the_cores_benchmark_measured_is_read(tmp_path):
    program = tmp_path / "bench_core"
    rates = {"fma_f32/threads:2": {"GOP/s": 199.0}, "dot_int8/threads:2": {"GOP/s": 828.0}}
    rates |= {f"{what}/256MiB/threads:2": {"GB/s": 13.0} for what in ("read", "memcpy")}
    text = json.dumps({"benchmarks": [{"name": f"machine/{name}"} | rate for name, rate in rates.items()]})
    program.write_text(
        f"#!{sys.executable}\nimport sys\n(out,) = [a for a in sys.argv if '_out=' in a]\n"
        f"open(out.split('=')[1], 'w').write({text!r})\n"
    )
    program.chmod(0o755)
    assert machine.by_loops(program) == machine.Peaks(199e9, 0, 828e9, 13e9, 13e9)


def test_what_runs_is_named(warm):
    quire = contenders.make(torch.randn(64, 128), "quantized")[2]
    assert quire.name == "quire fp8_current"
    for backward in (False, True):
        assert quire.kernels(torch.randn(4, 128), backward) not in ("", "None")


@pytest.mark.parametrize("real", [True, False])
def test_a_size_slower_than_the_next_is_a_cliff_if_it_stays_so(monkeypatch, real):
    asked = []

    def best_seconds(calls, seconds, **_):
        asked.append(list(calls))
        slow = real or len(asked) < 3
        return {size: 2.0 if size == 65 and slow else size / 100 for size in calls}

    monkeypatch.setattr(sweep, "best_seconds", best_seconds)
    monkeypatch.setattr(sweep, "call", lambda *_: None)
    rows = sweep.sweep("mxfp8", "M", False)
    assert [row["size"] for row in rows] == sweep.SIZES and asked[1:] == [[65, 97]] * (3 if real else 2)
    assert [row["size"] for row in rows if row["cliff"]] == ([65] if real else [])


def test_sizes_go_from_one_to_8192_by_powers_of_two_with_odd_ones_between():
    assert sweep.SIZES[0] == 1 and sweep.SIZES[-1] == 8192
    assert {1 << i for i in range(14)} < set(sweep.SIZES) and sum(size % 2 for size in sweep.SIZES) >= 20
    assert all(b / a <= 2 for a, b in zip(sweep.SIZES, sweep.SIZES[1:], strict=False))


@pytest.mark.slow
def test_the_script_prints_a_table_and_writes_figures_and_a_picture(tmp_path):
    sizes = "--m 1 3 --n 64 --k 128 --seconds 0.05 --threads 1 --peak-seconds 0".split()
    done = subprocess.run(
        [sys.executable, SCRIPT, *sizes, "--out", tmp_path], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "bench.json").read_text())
    rows = {(row["layer"], row["M"], row["pass"]): row for row in figures["layers"]}
    for m in (1, 3):
        for what in ("inference", "training"):
            single, low = (rows[f"torch {kind}", m, what]["us"] for kind in ("float32", "bfloat16"))
            ours = rows["quire nvfp4", m, what]
            # In float64, by other formulas.
            assert ours["x_better"] == pytest.approx(min(single, low) / ours["us"], rel=1e-14)
            flops = 2 * m * 64 * 128 * (3 if what == "training" else 1)
            assert ours["gflops"] == pytest.approx(flops / ours["us"] / 1e3, rel=1e-14)
    ours = rows["torch bfloat16", 3, "inference"]
    assert ours["gbytes"] * ours["us"] * 1e3 == pytest.approx(2 * (64 * 128 + 3 * (64 + 128)), rel=1e-14)
    assert {row["what"] for row in figures["quantizers"]} > {"copy", "quantize nvfp4", "dequantize mxfp8"}
    assert (tmp_path / "roofline.png").read_bytes()[:4] == b"\x89PNG"
    assert "x better" in done.stdout


CAPPED_PROGRAM = """
import argparse, json, sys
sys.path.insert(0, sys.argv.pop(1))
import capped
parser = argparse.ArgumentParser()
capped.add_option(parser)
capped.apply(parser.parse_args())
import torch
import quire
x = torch.ones(4, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(x, torch.ones(64, 64, dtype=torch.bfloat16))
found = [quire.explain(lambda: None).isa, torch.backends.cpu.get_cpu_capability(), capped.heading()]
print(json.dumps(found))
"""


def capped_run(isa, **environment):
    """A program under --isa; ONEDNN_VERBOSE makes oneDNN say what it takes the CPU for."""
    program = [sys.executable, "-c", CAPPED_PROGRAM, SCRIPT.parent, "--isa", isa]
    return subprocess.run(program, capture_output=True, text=True, env=os.environ | environment)


def test_capped_programs_start_anew_with_both_sides_capped():
    done = capped_run("avx2", ONEDNN_VERBOSE="1", QUIRE_ISA="scalar")
    if "lacks" in done.stderr:
        pytest.skip("the machine has no AVX2")
    assert done.returncode == 0, done.stderr
    *said, found = done.stdout.splitlines()
    assert json.loads(found) == ["avx2", "AVX2", " (capped: quire and PyTorch with no more than avx2)"]
    assert any("isa:Intel AVX2" in line for line in said) or not any("isa:" in line for line in said)


def test_a_side_that_does_not_heed_its_cap_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(capped.torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv(capped._MARK, "avx2")
    with pytest.raises(SystemExit, match="--isa avx2: .*PyTorch has avx512, not avx2"):
        capped.apply(argparse.Namespace(isa="avx2"))


def test_every_instruction_set_but_the_best_and_the_scalar_one_can_be_the_cap():
    assert set(capped.CAPS) == {"avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16"}
    assert capped.isa_of({}) is None and capped.isa_of(capped.environment("avx512")) == "avx512"
    assert capped.heading() == ""  # this process is not
