"""What ./dev does, one function per verb. Each sets up what it needs (workspace.py), so any may be run first."""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch_parts
import torch_pin
import tree
from workspace import (
    ROOT,
    Failure,
    arm_tools,
    compiler,
    enter_venv,
    googlebenchmark,
    googletest,
    install,
    say,
    tool,
    venv_beside,
    version_of,
)

CHECKS = ["check_layers", "check_budgets", "check_formats", "check_factories", "check_duplicates", "check_words"]
#: The device for machines without one: its own tests, and those that take a device, in a process for this device alone.
TEST_DEVICE = "quiretest"
DEVICE_TESTS = "tests/device"
#: Tests whose quick cases run on it once more with quire's CUDA kernels, on the emulator, and sums in their order.
ON_CUDA_ROWS = ["tests/device/test_quire_on_device.py", "tests/device/test_value_rules.py"]
ON_CUDA_ROWS += ["tests/python/golden/test_linear.py", "tests/python/golden/test_quantize.py"]
CUDA_ROWS = {"QUIRE_TEST_DEVICE_ROWS": "cuda", "QUIRE_KERNEL": "gemm:reference,matmul:reference"}
ON_ANY_DEVICE = ["tests/python", "tests/quire_torch"]
#: With packages that are in an environment of their own; and, of the others, those that read what these have written.
PEER_TESTS = (
    "tests/peers",
    "tests/python/integrations",
    "tests/python/io/test_other_tools.py",
    "tests/docs/test_integrations.py",
    "tests/docs/test_lora.py",
)
#: The most processes that share the tests. Each takes up to two GiB, and half a minute of a core before it runs any:
#: it imports all tests, and starts the processes from which tests fork theirs.
WORKERS = 8
#: Microseconds of cores in each period of so many, or "max", in a container (cgroup v2).
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: What pytest says when it was left with none.
NO_TESTS = 5
# Tests that call operators in every way, and compile nothing.
SANITIZED_TESTS = [
    f"tests/quire_torch/test_{name}.py"
    for name in (
        *("fuzz_operators", "grouped_operators", "linear_operands", "moe_operators", "pointwise_operators"),
        *("refusals", "runner_operators"),
    )
]
SANITIZER_OPTIONS = {
    # PyTorch is not built so: it ends with memory that is still in use, and new and delete are not its own.
    "detect_leaks": 0,
    "alloc_dealloc_mismatch": 0,
    # The fuzzer asks for sizes that no machine has: PyTorch refuses these calls, and the process goes on.
    "allocator_may_return_null": 1,
    "max_allocation_size_mb": 2048,
}
#: What 64-bit ARM is called by compilers, by pip and by the presets of CMake.
ARM = "aarch64"
# The CPUs that qemu imitates, and which tests run there: with one that has every feature all instruction sets, and with
# one that has neither the dot product nor bfloat16 the best that is left.
ARM_CPUS = {"max": [], "cortex-a72": ["--label-regex", "first_isa"]}
#: Libraries that a wheel's libraries need and PyTorch has loaded before.
BROUGHT_BY_PYTORCH = ("libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libgomp.so.1")
# What `./dev bench NAME` runs; without a name bench.py.
BENCHMARKS = {
    "demo": "benchmarks/demo.py",
    "distributed": "benchmarks/distributed.py",
    "encoder": "examples/encoder/run.py",
    "ggml": "benchmarks/ggml.py",
    "host": "benchmarks/host.py",
    "import": "benchmarks/imports.py",
    "invariance": "benchmarks/invariance.py",
    "moe": "benchmarks/moe.py",
    "refit": "benchmarks/refit.py",
}


def run(*command) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT)


def compile_caches(folder: Path) -> dict[str, str]:
    """PyTorch's compile caches know an operator by its schema, not by its code: each build has keys of its own. All
    share the folder, where the compiler's results are found by the generated code."""
    (library,) = folder.glob("lib/torch-*/libquire_torch.so")
    tag = hashlib.sha256(library.read_bytes()).hexdigest()[:16]
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "TORCH_COMPILE_CACHE_KEY_TAG": tag}


def hand_over(*command, folder: Path | None = None, **environment: str) -> None:
    """Goes on as another program, whose output and exit status are then those of ./dev. folder: of the build."""
    caches = compile_caches(folder or release_folder())
    arguments = [sys.executable, *(str(part) for part in command)]
    os.execve(sys.executable, arguments, caches | os.environ | environment)


def configure(folder: Path, preset: str, **options: str) -> None:
    """Writes the build folder, once: ninja starts CMake again when a CMake file or the list of sources changes."""
    say(f"configuring {folder.relative_to(ROOT)}")
    settings = [f"-D{name}={value}" for name, value in options.items()]
    ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    command = [tool("cmake"), "--preset", preset, "-B", str(folder), ninja, *settings]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        (folder / "build.ninja").unlink(missing_ok=True)
        raise Failure(f"the configuration failed:\n{done.stdout}")


def compile_targets(folder: Path, *targets: str) -> None:
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    run(tool("cmake"), "--build", folder, *(["--target", *targets] if targets else []), "--", *quiet)


def golden() -> Path:
    return release_folder() / "golden"


def release_folder() -> Path:
    """One per PyTorch version, so that going back and forth rebuilds nothing."""
    return ROOT / "build" / f"torch-{torch_pin.installed()}"


def build(tests: bool = False) -> None:
    """Builds in place: python/quire/lib is a link to where the libraries lie."""
    compiler()
    folder = release_folder()
    cache = folder / "CMakeCache.txt"
    if tests:
        googletest()
    if not (folder / "build.ninja").exists() or (tests and "QUIRE_TESTS:BOOL=ON" not in cache.read_text()):
        configure(folder, "cpu-release", QUIRE_TESTS="ON" if tests else "OFF", Python_EXECUTABLE=sys.executable)
    compile_targets(folder, *([] if tests else ["libraries"]))

    link, target = ROOT / "python/quire/lib", os.path.relpath(folder / "lib", ROOT / "python/quire")
    if not link.is_symlink() or os.readlink(link) != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def cores() -> int:
    """How many cores this process may use at once: taskset and the quota of a container leave fewer than there are."""
    usable = len(os.sched_getaffinity(0))
    if CPU_QUOTA.exists():
        quota, period = CPU_QUOTA.read_text().split()
        if quota != "max":
            usable = min(usable, max(1, round(int(quota) / int(period))))
    return usable


def ctest(folder: Path, *options: str, **environment: str) -> None:
    command = [tool("ctest"), "--test-dir", folder, "--output-on-failure", "--parallel", cores(), *options]
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, env=os.environ | environment)


def pytest(*arguments: str, **environment: str) -> bool:
    """Whether these tests pass, in a process of their own; there may be none."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, env=test_environment() | environment).returncode in (0, NO_TESTS)


def test_environment() -> dict[str, str]:
    # Without the first, each process that compiles starts others, which import PyTorch and compile nothing: threads
    # compile what runs on a CPU. The second is of the code around kernels that AOTInductor makes. Without the third,
    # each process that compiles asks another one whether it can load code of the CPU's instruction set.
    quick = compile_caches(release_folder()) | {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    # Whatever the caller's environment says of bytecode: the several processes of pytest would each rewrite every file.
    return quick | os.environ | {"QUIRE_GOLDEN_DIR": str(golden()), "PYTHONDONTWRITEBYTECODE": ""}


def workers() -> tuple[list[str], dict[str, str]]:
    """Options and environment that share tests among processes of one thread: few tests compute on several."""
    count = min(cores(), WORKERS)
    if count == 1 or version_of("pytest-xdist") is None:
        return [], {}
    return ["--numprocesses", str(count), "--dist", "worksteal"], {"OMP_NUM_THREADS": "1"}


def test(arguments: list[str], quick: bool = False) -> None:
    """All tests, or of each file the quick ones; with arguments pytest alone, in one process."""
    if not arguments:
        check()
    build(tests=True)
    os.chdir(ROOT)
    tier = ["--quick"] if quick else []
    if arguments:
        hand_over("-m", "pytest", *tier, *arguments, **test_environment())
    ctest(release_folder(), *(["--label-exclude", "other_isa"] if quick else []))
    shared, environment = workers()
    others = [*tier, f"--ignore={DEVICE_TESTS}"]
    devices = [TEST_DEVICE, "cuda"] if shutil.which("nvidia-smi") else [TEST_DEVICE]
    passed = [
        pytest(*others, *shared, "-m", "not alone", **environment),
        pytest(*others, "-m", "alone"),
        *(pytest(*tier, *shared, "--device", name, DEVICE_TESTS, *ON_ANY_DEVICE, **environment) for name in devices),
    ]
    if (release_folder() / "lib/libquire_cuda.so").exists():
        passed.append(pytest("--quick", *shared, "--device", TEST_DEVICE, *ON_CUDA_ROWS, **environment, **CUDA_ROWS))
    if not all(passed):
        raise Failure("tests failed, see above")


def test_of(arguments: argparse.Namespace, rest: list[str]) -> None:
    if arguments.asan:
        test_with_sanitizers()
    elif arguments.arm:
        test_on_arm(rest)
    elif arguments.peers:
        test_with_peers(rest)
    else:
        test(rest, arguments.quick)


def test_with_sanitizers() -> None:
    """The core's tests, then the operators' and their fuzzer in a Python process that has the sanitizer's runtime."""
    compiler()
    googletest()
    folder = ROOT / "build/asan"
    if not (folder / "build.ninja").exists():
        configure(folder, "asan", Python_EXECUTABLE=sys.executable)
    compile_targets(folder)
    ctest(folder)
    # The package as it is, with the libraries of this build.
    package = folder / "python/quire"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for source in [*(one for one in (ROOT / "python/quire").iterdir() if one.name != "lib"), folder / "lib"]:
        (package / source.name).symlink_to(source)
    # Without the C++ library beside it, the sanitizer's runtime, which comes first, finds no function that throws.
    runtimes = [library_of_compiler(name) for name in ("libasan.so", "libstdc++.so.6")]
    hand_over(
        *("-m", "pytest", "-q", "--capture=sys", *SANITIZED_TESTS),  # what the sanitizers write goes past pytest
        folder=folder,
        PYTHONPATH=str(package.parent),
        LD_PRELOAD=" ".join(runtimes),
        ASAN_OPTIONS=":".join(f"{name}={value}" for name, value in SANITIZER_OPTIONS.items()),
        UBSAN_OPTIONS="print_stacktrace=1",
        QUIRE_FUZZ_SANITIZED="1",
    )


def arm_build() -> Path:
    """The folder where the core for 64-bit ARM is built."""
    arm_tools()
    folder = ROOT / f"build/{ARM}"
    if not (folder / "build.ninja").exists():
        configure(folder, ARM)
    return folder


def test_on_arm(options: list[str]) -> None:
    """The core's tests for 64-bit ARM under qemu, with each CPU of ARM_CPUS. options: of ctest."""
    folder = arm_build()
    compile_targets(folder)
    for cpu, chosen in ARM_CPUS.items():
        say(f"testing with the CPU {cpu}")
        ctest(folder, *chosen, *options, QEMU_CPU=cpu)


def test_with_peers(arguments: list[str]) -> None:
    """Tests with the tools whose checkpoints quire reads and whose models it runs, in an environment of their own."""
    build()
    python = venv_beside("peers", "oracles")
    command = [python, "-m", "pytest", "-q", *(arguments or PEER_TESTS)]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=test_environment())
    if done.returncode:
        raise Failure("tests failed, see above")


def library_of_compiler(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def operators(release: str, core: Path, arm: bool = False) -> Path:
    """The operators for a release of PyTorch that is not installed, for the core that is built in that folder."""
    folder, preset, machine, options = ROOT / f"build/operators-{release}", "cpu-release", None, {}
    if arm:
        folder, preset, machine = ROOT / f"build/operators-{release}-{ARM}", f"{ARM}-operators", ARM
        # CMake does not look for them here. They fit: both machines are 64-bit Linux, with C types of the same sizes.
        options["Python_INCLUDE_DIR"] = sysconfig.get_path("include")
    options |= {"QUIRE_TORCH_ROOT": torch_parts.folder_of(release, machine), "QUIRE_CORE": core / "lib"}
    configure(folder, preset, Python_EXECUTABLE=sys.executable, **{key: str(of) for key, of in options.items()})
    compile_targets(folder, "libraries")
    install = [tool("cmake"), "--install", folder, "--strip", "--prefix", folder / "installed"]
    subprocess.run(list(map(str, install)), check=True, stdout=subprocess.DEVNULL)
    (found,) = folder.glob("installed/lib/torch-*")
    return found


def wheel(folder: Path = ROOT / "dist", releases: Sequence[str] = torch_pin.RELEASES) -> Path:
    """Packs what ./dev build has built, and the operators for further releases of PyTorch."""
    build()
    here = torch_pin.minor(torch_pin.installed())
    more = [operators(release, release_folder()) for release in releases if torch_pin.minor(release) != here]
    return pack(release_folder(), more, folder, for_all=len(more) + 1 == len(torch_pin.RELEASES))


def wheel_for_arm(folder: Path = ROOT / "dist", releases: Sequence[str] = torch_pin.RELEASES) -> Path:
    """The same for 64-bit ARM, built by a cross compiler. It has no kernels for GPUs."""
    core = arm_build()
    compile_targets(core, "quire")
    built = [operators(release, core, arm=True) for release in releases]
    machine = {"_PYTHON_HOST_PLATFORM": f"linux-{ARM}"}
    for_all = len(built) == len(torch_pin.RELEASES)
    return pack(core, built, folder, "build.targets=quire", for_all=for_all, **machine)


def pack(built: Path, more: list[Path], folder: Path, *options: str, for_all: bool, **environment: str) -> Path:
    """A wheel of what is built in one folder, and of the folders of further operators. for_all: it has those for every
    release of PyTorch. options: of scikit-build-core."""
    if for_all:
        environment["QUIRE_WHEEL_FOR_ALL"] = "1"
    settings = [f"build-dir={built}", f"cmake.define.QUIRE_MORE_OPERATORS={';'.join(map(str, more))}", *options]
    with tempfile.TemporaryDirectory() as made:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--wheel-dir", made]
        given = ["--no-build-isolation", "--no-deps", "--no-index", *(f"--config-settings={one}" for one in settings)]
        subprocess.run([*pip, *given, str(ROOT)], check=True, env=finding("ninja") | environment)
        (found,) = Path(made).iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        return tagged(found, folder)


def finding(program: str) -> dict[str, str]:
    """The environment of a command that looks for a program on PATH."""
    return os.environ | {"PATH": os.pathsep.join([str(Path(tool(program)).parent), os.environ["PATH"]])}


def tagged(wheel: Path, folder: Path) -> Path:
    """Moves a wheel to a folder, under the name of the oldest systems that have all symbols its libraries ask for."""
    if version_of("auditwheel") is None:
        say("auditwheel is not installed: the wheel's name does not say which systems it runs on")
        return Path(shutil.move(wheel, folder / wheel.name))
    excluded = [f"--exclude={name}" for name in BROUGHT_BY_PYTORCH]
    with tempfile.TemporaryDirectory() as made:
        audit = [sys.executable, "-m", "auditwheel", "repair", "--plat=auto", *excluded, f"--wheel-dir={made}", wheel]
        done = subprocess.run(
            [str(part) for part in audit],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=finding("patchelf"),
        )
        if done.returncode:
            raise Failure(f"auditwheel refuses {wheel.name}:\n{done.stdout}")
        (found,) = Path(made).iterdir()
        return Path(shutil.move(found, folder / found.name))


def wheel_of(arguments: argparse.Namespace) -> None:
    if arguments.arm:
        made = wheel_for_arm(releases=[arguments.torch] if arguments.torch else torch_pin.RELEASES)
    else:
        made = wheel(releases=() if arguments.torch else torch_pin.RELEASES)
    say(f"made {made.relative_to(ROOT)}, {made.stat().st_size / 1e6:.1f} MB")


def script(path: str, arguments: list[str]) -> None:
    build()
    hand_over(ROOT / path, *arguments)


def bench_core(arguments: list[str]) -> None:
    """Built without PyTorch, in a folder of its own."""
    compiler()
    googlebenchmark()
    folder = ROOT / "build/core"
    if not (folder / "build.ninja").exists():
        configure(folder, "cpu-release", QUIRE_TORCH="OFF", QUIRE_BENCHMARKS="ON")
    compile_targets(folder, "bench_core")
    program = str(folder / "benchmarks/bench_core")
    os.execv(program, [program, *arguments])


def bench(arguments: list[str]) -> None:
    if arguments[:1] == ["core"]:
        return bench_core(arguments[1:])
    named = bool(arguments) and arguments[0] in BENCHMARKS
    script(BENCHMARKS[arguments[0]] if named else "benchmarks/bench.py", arguments[named:])


def extra_packages(verb: str, rest: list[str]) -> list[str]:
    """The groups of pyproject.toml that only this needs."""
    if verb == "test":
        return ["encoder", "lm", "site", "wheel"]
    if verb == "wheel":
        return ["wheel"]
    if verb == "chat":
        return ["lm"]
    if verb == "docs":
        return ["site"]
    if verb == "bench" and rest[:1] == ["encoder"]:
        return ["encoder"]
    return ["peers"] if verb == "bench" and rest[:1] not in ([name] for name in [*BENCHMARKS, "core"]) else []


def docs() -> None:
    # Not --quiet, under which strict sees no warnings.
    run(sys.executable, "-m", "mkdocs", "build")
    say("made build/site/index.html")


def fmt() -> None:
    run(tool("clang-format"), "-i", *tree.files(ROOT, *tree.CPP))
    run(tool("ruff"), "check", "--quiet", "--fix-only", ".")
    run(tool("ruff"), "format", "--quiet", ".")


def check() -> None:
    commands = [
        [tool("clang-format"), "--dry-run", "-Werror", *tree.files(ROOT, *tree.CPP)],
        [tool("ruff"), "format", "--quiet", "--check", "--output-format=concise", "."],
        [tool("ruff"), "check", "--quiet", "--output-format=concise", "."],
        *([sys.executable, ROOT / f"tools/{name}.py"] for name in CHECKS),
    ]
    if any([subprocess.run(command, cwd=ROOT).returncode for command in commands]):
        raise Failure("the checks found something, see above (./dev fmt mends formatting)")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="./dev",
        description="Builds, tests and runs quire. Every verb first sets up what it needs; there is no other step.",
        epilog="The environment variable QUIRE_PYTHON names the Python that .venv is made from.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument(
        "--torch", metavar="VERSION", help="with this version of PyTorch, such as 2.11.0, which stays in .venv"
    )
    verbs.add_parser("build", parents=[chosen], help="set up and build, nothing else")
    verbs.add_parser("train", add_help=False, help="the demo; further arguments go to examples/train/train.py")
    verbs.add_parser("chat", add_help=False, help="a language model; further arguments go to examples/chat/chat.py")
    tests = verbs.add_parser(
        "test", parents=[chosen], help="check, then all tests; with arguments, pytest alone with these arguments"
    )
    tests.add_argument("--quick", action="store_true", help="for the edit loop: of each test one case that is cheap")
    tests.add_argument(
        "--asan", action="store_true", help="the core's and the operators' tests under the sanitizers instead"
    )
    tests.add_argument(
        "--peers", action="store_true", help="the tests with other tools for checkpoints instead, which it installs"
    )
    tests.add_argument(
        "--arm", action="store_true", help="the core's tests for 64-bit ARM under qemu instead; then options of ctest"
    )
    verbs.add_parser(
        "bench",
        add_help=False,
        help="layers against PyTorch's; `bench demo`: training steps of its model; `bench distributed`: of two "
        "processes; `bench moe`: experts; `bench host`: the cost of a call; `bench import`: of `import quire`; "
        "`bench refit`: new weights; `bench invariance`: the cost of quire.batch_invariant; "
        "`bench encoder`: a converted model; "
        "`bench ggml`: build that peer; `bench core`: kernels beside memcpy; then their arguments",
    )
    verbs.add_parser("docs", help="the documentation as a site, in build/site")
    wheels = verbs.add_parser(
        "wheel",
        parents=[chosen],
        help=f"a wheel in dist/, which needs no compiler, for PyTorch {torch_pin.RANGE}; with --torch for one version",
    )
    wheels.add_argument(
        "--arm", action="store_true", help="for 64-bit ARM, by a cross compiler; without kernels for GPUs"
    )
    verbs.add_parser("fmt", help="format all sources")
    verbs.add_parser("check", help="formatting, lint, layers, budgets, words")
    arguments, rest = parser.parse_known_args(argv)
    if rest and (arguments.verb not in ("chat", "train", "test", "bench") or getattr(arguments, "asan", False)):
        parser.error(f"{arguments.verb} takes no further arguments; got {' '.join(rest)}")
    return arguments, rest


def main() -> int:
    arguments, rest = parse(sys.argv[1:])
    verbs = {
        "build": build,
        "chat": lambda: script("examples/chat/chat.py", rest),
        "train": lambda: script("examples/train/train.py", rest),
        "test": lambda: test_of(arguments, rest),
        "bench": lambda: bench(rest),
        "wheel": lambda: wheel_of(arguments),
        "docs": docs,
        "fmt": fmt,
        "check": check,
    }
    needs_torch = arguments.verb not in ("docs", "fmt", "check")
    if named := getattr(arguments, "torch", None):
        os.environ["QUIRE_TORCH"] = named
    try:
        enter_venv()
        install(needs_torch, *extra_packages(arguments.verb, rest))
        verbs[arguments.verb]()
    except Failure as failure:
        say(str(failure))
        return 1
    except subprocess.CalledProcessError as failure:
        say(f"{Path(failure.cmd[0]).name} failed")
        return failure.returncode if failure.returncode > 0 else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
