"""Options of the tests, which of them are the quick ones, where they compute, and the program that several share."""

import fcntl
import inspect
import os
import re
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

import pytorch
from devices import DEVICES, absence_of, launched, leave_broken, prepare

#: Tests of the test device itself, and of quire on it.
OF_DEVICE = Path(__file__).parent / "device"
ALONE = "pytest.mark.alone"
#: How many cases of this run wait for a machine with a GPU.
WAITING = pytest.StashKey[int]()
#: How many modules there were when Python's collector was last told to leave all objects alone.
FROZEN = pytest.StashKey[int]()
TAKES_DEVICE = re.compile(r"def test_\w+\([^)]*\bdevice\b|pytest\.mark\.any_device")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=20, help="how long the fuzzer of operators calls them")
    parser.addoption("--fuzz-seed", type=int, default=0, help="which calls it makes")
    parser.addoption(
        "--device", choices=DEVICES, default="cpu", help="where tests that take `device` compute; not cpu: only these"
    )
    parser.addoption(
        "--default",
        choices=["bfloat16", "float16", "float64", "meta"],
        help="what quire sees in each test as torch's default dtype, or device",
    )
    parser.addoption("--quick", action="store_true", help="of each test one case that is cheap")


def pytest_configure(config: pytest.Config) -> None:
    prepare(config.getoption("--device"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files where no test takes the device, or none is marked alone where only those are asked for: to import all files
    takes longer than such tests."""
    if collection_path.suffix != ".py":
        return None
    if config.option.markexpr == "alone" and ALONE not in collection_path.read_text():
        return True
    if collection_path.parent == OF_DEVICE:
        return True if config.getoption("--device") == "cuda" else None
    if config.getoption("--device") == "cpu":
        return None
    return None if TAKES_DEVICE.search(collection_path.read_text()) else True


def takes_device(item: pytest.Item, device: str) -> bool:
    """Whether a test says itself that it computes on the device: fixtures that it takes do not say so for it."""
    if item.path.parent == OF_DEVICE:
        return device == "quiretest"
    if item.get_closest_marker("off_devices") or (device == "cuda" and item.get_closest_marker("interleaved")):
        return False
    if "device" in inspect.signature(item.function).parameters:
        return True
    return on_default_device(item)


def on_default_device(item: pytest.Item) -> bool:
    """Whether a test computes wherever torch makes its tensors."""
    return bool(item.get_closest_marker("any_device")) and not item.get_closest_marker("cpu_only")


def compiles(item: pytest.Item) -> bool:
    """Whether a test asks for the compiler, unless this case of it runs in eager mode."""
    ways = item.callspec.params if hasattr(item, "callspec") else {}
    eager = ways.get("compiled") is False or ways.get("forward") == "eager"
    return "compiler" in item.fixturenames and not eager


def cheap(item: pytest.Item) -> bool:
    if item.get_closest_marker("quick"):
        return True
    return not (item.get_closest_marker("slow") or compiles(item))


def one_of_each_test(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Always the same case of a test, wherever its file lies, and of different tests different ones, so that all
    recipes are seen."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return [cases[zlib.crc32(test.partition("::")[2].encode()) % len(cases)] for test, cases in tests.items()]


def chosen(items: list[pytest.Item], device: str, quick: bool) -> set[pytest.Item]:
    """Which cases run on a device."""
    if device == "cpu":
        items = [item for item in items if not item.get_closest_marker("off_cpu")]
    else:
        items = [item for item in items if takes_device(item, device)]
    if quick:
        return set(one_of_each_test(filter(cheap, items)))
    if device != "cpu":  # the other cases run on the CPU
        some = set(one_of_each_test(item for item in items if on_default_device(item) and cheap(item)))
        items = [item for item in items if item in some or not on_default_device(item)]
    return set(items)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device, quick = config.getoption("--device"), config.getoption("--quick")
    kept = chosen(items, device, quick)
    if absence_of("cuda") and device != "quiretest":
        config.stash[WAITING] = len(chosen(items, "cuda", quick))
    if absence_of(device):
        kept = set()
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Without a GPU its cases are no failures, unless QUIRE_REQUIRE_CUDA=1 says so."""
    waiting = session.config.stash.get(WAITING, 0)
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist
        session.config.workeroutput["waiting"] = waiting
    elif waiting and os.environ.get("QUIRE_REQUIRE_CUDA") == "1":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif waiting and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Each process of pytest-xdist has seen all cases."""
    node.config.stash[WAITING] = getattr(node, "workeroutput", {}).get("waiting", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if waiting := config.stash.get(WAITING, 0):
        failed = ", which QUIRE_REQUIRE_CUDA=1 makes a failure" * (os.environ.get("QUIRE_REQUIRE_CUDA") == "1")
        terminalreporter.write_line(f"cuda: {waiting} cases skipped, {absence_of('cuda')}{failed}", yellow=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        leave_broken(item.config.getoption("--device"), f"{item.nodeid}\n{report.longreprtext}")
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if len(sys.modules) - item.config.stash.get(FROZEN, 0) > 100:  # as torch.compile imports
        pytorch.freeze()
        item.config.stash[FROZEN] = len(sys.modules)


@pytest.fixture(autouse=True)
def seen_default(request: pytest.FixtureRequest):
    """What --default says."""
    if (name := request.config.getoption("--default")) is None:
        yield
        return
    from defaults import seen_by_quire_only

    with seen_by_quire_only(name):
        yield


@pytest.fixture
def device(request: pytest.FixtureRequest):
    """Where a test computes: inputs are made on the CPU and moved to it, and results come back by .cpu()."""
    with DEVICES[request.config.getoption("--device")]() as place:
        yield place


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest):
    """Makes the device torch's default one in tests marked any_device, and sees that they launch something there."""
    if request.config.getoption("--device") == "cpu" or not on_default_device(request.node):
        yield
        return
    with request.getfixturevalue("device") as place:  # torch's default device
        yield
    assert launched(place), "it is marked any_device, but launched nothing there: mark it cpu_only"


@pytest.fixture(scope="session")
def serve() -> Path:
    """The program of examples/serve_cpp, as a user would build it: against an installation, not the build folder."""
    import torch

    from pytorch import need_cmake_package
    from quire.loading import library
    from workspace import ROOT, tool

    need_cmake_package()
    built = library.FOLDER.resolve().parent
    folder = built / "serve"
    folder.mkdir(exist_ok=True)
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "CMAKE_PREFIX_PATH": f"{folder / 'prefix'};{torch.utils.cmake_prefix_path}",
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    commands = [
        ["--install", built, "--prefix", folder / "prefix"],
        ["-S", ROOT / "examples/serve_cpp", "-B", folder / "build", "-G", "Ninja", *defines],
        ["--build", folder / "build"],
    ]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that share the tests builds it
        for command in commands:
            done = subprocess.run(
                [tool("cmake"), *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            assert done.returncode == 0, done.stdout
    return folder / "build/serve"
