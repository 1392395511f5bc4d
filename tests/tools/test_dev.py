"""./dev hands arguments on to what it runs."""

import tomllib
import types

import pytest

import dev
import torch_parts


@pytest.mark.parametrize(
    ("given", "script", "rest"),
    [
        ([], "benchmarks/bench.py", []),
        (["--m", "1", "16"], "benchmarks/bench.py", ["--m", "1", "16"]),
        (["encoder", "--batch", "5"], "examples/encoder/run.py", ["--batch", "5"]),
        (["ggml"], "benchmarks/ggml.py", []),
        (["host"], "benchmarks/host.py", []),
        (["host", "--rounds", "3"], "benchmarks/host.py", ["--rounds", "3"]),
        (["import"], "benchmarks/imports.py", []),
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


@pytest.mark.parametrize(
    ("verb", "rest", "groups"),
    [
        ("test", ["tests/docs"], ["encoder", "lm", "site", "wheel"]),
        ("wheel", [], ["wheel"]),
        ("docs", [], ["site"]),
        ("bench", ["encoder"], ["encoder"]),
        ("bench", [], ["peers"]),
        ("bench", ["--sweep"], ["peers"]),
        ("bench", ["host"], []),
        ("train", [], []),
        ("chat", ["Hello"], ["lm"]),
    ],
)
def test_packages_for_one_verb_are_installed_for_it_alone(verb, rest, groups):
    assert dev.extra_packages(verb, rest) == groups
    pins = tomllib.loads((dev.ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert all("==" in pin for group in groups for pin in pins[group])


def test_the_version_of_pytorch_is_an_option_of_what_builds(monkeypatch):
    monkeypatch.setattr(dev.os, "environ", {})
    monkeypatch.setattr(dev.sys, "argv", ["dev", "test", "--torch", "2.11.0", "tests/docs"])
    seen = []
    monkeypatch.setattr(dev, "enter_venv", lambda: seen.append(dev.os.environ["QUIRE_TORCH"]))
    monkeypatch.setattr(dev, "install", lambda *_: seen.append(dev.torch_pin.wanted()))
    monkeypatch.setattr(dev, "test", lambda arguments, quick: seen.append(arguments))
    assert dev.main() == 0
    assert seen == ["2.11.0", "2.11.0", ["tests/docs"]]


def test_bench_core_builds_and_becomes_the_program_of_the_core(monkeypatch):
    ran = []
    for name in ("compiler", "googlebenchmark", "configure"):
        monkeypatch.setattr(dev, name, lambda *_, **__: None)
    monkeypatch.setattr(dev, "compile_targets", lambda folder, *targets: ran.append(targets))
    monkeypatch.setattr(dev.os, "execv", lambda program, arguments: ran.append(arguments[1:]))
    dev.bench(["core", "--threads=1"])
    assert ran == [("bench_core",), ["--threads=1"]]


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """What dev.test() runs, and the results that it is given."""
    ran, results = [], [True, True, True, True]
    for name in ("check", "build", "compile_caches"):
        monkeypatch.setattr(dev, name, lambda *_, **__: None)
    monkeypatch.setattr(dev.os, "chdir", lambda folder: None)
    monkeypatch.setattr(dev, "ctest", lambda *call: ran.append(call[1:]))
    monkeypatch.setattr(dev, "pytest", lambda *call, **_: ran.append(call) or results[(len(ran) - 2) % 5])
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libquire_cuda.so").touch()
    monkeypatch.setattr(dev, "release_folder", lambda: tmp_path)
    return ran, results


def test_the_tiers_differ_by_an_option_and_by_instruction_sets(runs):
    ran, _ = runs
    dev.test([])
    dev.test([], quick=True)
    whole, quick = ran[:5], ran[5:]
    assert whole[0] == () and quick[0] == ("--label-exclude", "other_isa")
    for one, other in zip(whole[1:4], quick[1:4], strict=True):
        assert other == ("--quick", *one)
    assert quick[4] == whole[4] and whole[4][0] == "--quick"
    assert [call[-1] for call in whole[1:3]] == ["not alone", "alone"]
    folders = ("tests/device", "tests/python", "tests/quire_torch")
    assert whole[3][-5:] == ("--device", "quiretest", *folders)
    assert whole[4][-6:] == ("--device", "quiretest", *dev.ON_CUDA_ROWS)


def test_a_build_without_cuda_kernels_runs_nothing_on_them(runs, tmp_path):
    (tmp_path / "lib/libquire_cuda.so").unlink()
    dev.test([])
    assert len(runs[0]) == 4


@pytest.mark.parametrize("failing", range(4))
def test_no_process_of_tests_fails_in_silence(runs, failing):
    ran, results = runs
    results[failing] = False
    with pytest.raises(dev.Failure, match="tests failed"):
        dev.test([])
    assert len(ran) == 5, "the others run too"


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"),
    [
        ({3, 5}, None, 2),
        ({0, 1, 2, 3}, "max 100000\n", 4),
        ({0, 1, 2, 3}, "200000 100000\n", 2),
        ({0, 1, 2, 3}, "800000 100000\n", 4),
        ({0, 1}, "20000 100000\n", 1),
    ],
)
def test_as_many_processes_run_as_there_are_cores_to_use(affinity, quota, cores, monkeypatch, tmp_path):
    monkeypatch.setattr(dev.os, "sched_getaffinity", lambda process: affinity)
    monkeypatch.setattr(dev, "CPU_QUOTA", tmp_path / "cpu.max")
    if quota:
        dev.CPU_QUOTA.write_text(quota)
    monkeypatch.setattr(dev, "version_of", lambda name: "3")
    assert dev.cores() == cores
    assert dev.workers()[0][:2] == (["--numprocesses", str(cores)] if cores > 1 else [])


@pytest.fixture
def packs(monkeypatch):
    """What ./dev wheel packs: the folder of the core, the operators, and what the package says of itself."""
    packed = []
    for name in ("build", "arm_tools", "configure", "compile_targets"):
        monkeypatch.setattr(dev, name, lambda *_, **__: None)
    monkeypatch.setattr(dev.torch_pin, "installed", lambda: "2.13.0+cpu")
    monkeypatch.setattr(dev, "operators", lambda release, core, arm=False: f"{release} {core.name} {arm}")
    monkeypatch.setattr(dev, "pack", lambda *call, **said: packed.append((call, said)) or dev.ROOT / "dev")
    return packed


def test_a_wheel_for_arm_has_operators_for_every_release_and_the_core_of_the_arm_tests(packs):
    dev.wheel_of(dev.parse(["wheel", "--arm"])[0])
    dev.wheel_of(dev.parse(["wheel"])[0])
    (core, more, _, targets), said = packs[0]
    assert core == dev.ROOT / "build/aarch64" and targets == "build.targets=quire"
    assert more == [f"2.{n}.0 aarch64 True" for n in (11, 12, 13, 14, 15)]
    assert said == {"for_all": True, "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    (core, more, _), said = packs[1]
    assert more == [f"2.{n}.0 {core.name} False" for n in (11, 12, 14, 15)] and said == {"for_all": True}


def test_a_wheel_for_one_version_of_pytorch_serves_no_other(packs):
    dev.wheel_of(dev.parse(["wheel", "--arm", "--torch", "2.13.0"])[0])
    dev.wheel_of(dev.parse(["wheel", "--torch", "2.13.0"])[0])
    assert [call[1] for call, _ in packs] == [["2.13.0 aarch64 True"], []]
    assert [said["for_all"] for _, said in packs] == [False, False]


@pytest.mark.parametrize(("machine", "asked"), [(None, []), ("aarch64", ["--platform=manylinux_2_28_aarch64"])])
def test_pytorch_for_another_machine_is_asked_for_by_its_platform(monkeypatch, tmp_path, machine, asked):
    (tmp_path / "torch-2.13.0-any.whl").touch()
    ran = []
    monkeypatch.setattr(
        torch_parts.subprocess, "run", lambda command: ran.append(command) or types.SimpleNamespace(returncode=0)
    )
    torch_parts.download("2.13.0", tmp_path, machine)
    assert [option for option in ran[0] if str(option).startswith("--platform")] == asked


def test_on_arm_a_cpu_without_the_dot_product_runs_the_best_that_is_left(monkeypatch):
    ran = []
    for name in ("arm_tools", "configure", "compile_targets"):
        monkeypatch.setattr(dev, name, lambda *_, **__: None)
    monkeypatch.setattr(dev, "ctest", lambda _, *options, **environment: ran.append((options, environment)))
    parsed, rest = dev.parse(["test", "--arm", "--tests-regex", "norm"])
    dev.test_of(parsed, rest)
    assert ran == [
        (("--tests-regex", "norm"), {"QEMU_CPU": "max"}),
        (("--label-regex", "first_isa", "--tests-regex", "norm"), {"QEMU_CPU": "cortex-a72"}),
    ]
