"""The wheel, as Python and CMake use it once installed. It is made from the build folder of ./dev, so it is quick."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import dev
import quire
from pytorch import need_cmake_package
from quire.loading import library as loaded
from workspace import ROOT, tool, version_of

pytestmark = pytest.mark.slow

CONSUMER = ROOT / "tests/consumer"


def run(*command: object, **kwargs) -> str:
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, **kwargs
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return dev.wheel(tmp_path_factory.mktemp("wheel"), releases=())


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with the package in it, as pip would unpack it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def operators_of(site: Path) -> Path:
    return site / "quire/lib" / loaded.folder().name


def dynamic_section(library: Path) -> str:
    return run("readelf", "--dynamic", library)


def test_pip_builds_every_library_that_it_installs():
    """`pip install .` begins with an empty folder, which this file's wheel does not."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["build"]["targets"]
    (among,) = re.findall(r"foreach\(library (.*)\)", (ROOT / "CMakeLists.txt").read_text())
    recipes = [*ROOT.glob("cmake/*.cmake"), *ROOT.glob("src/*/CMakeLists.txt")]
    installed = re.findall(r"install\(TARGETS (\w+)", "".join(path.read_text() for path in recipes))
    assert built == ["libraries"] and {"quire", "quire_cuda", "quire_torch"} <= set(installed) <= set(among.split())


def test_a_wheel_serves_every_python_and_pins_the_minor_version_of_torch(wheel, site):
    assert "-cp311-abi3-" in wheel.name
    (metadata,) = site.glob("quire-*.dist-info/METADATA")
    major, minor, *_ = torch.__version__.split(".")
    lines = metadata.read_text().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert f"Version: {quire.__version__}" in lines
    has_binding = (operators_of(site) / "quire_python.abi3.so").exists()
    assert has_binding == (loaded.folder() / "quire_python.abi3.so").exists()
    assert required == [f"Requires-Dist: torch=={major}.{minor}.*", "Requires-Dist: tqdm"]


def test_the_name_of_a_wheel_says_which_systems_have_what_its_libraries_need(wheel, site):
    if version_of("auditwheel") is None:
        pytest.skip("auditwheel is not installed")
    symbols = [run("readelf", "--version-info", library) for library in (site / "quire/lib").rglob("*.so")]
    needed = {tuple(map(int, found)) for text in symbols for found in re.findall(r"GLIBC_(\d+)\.(\d+)\b", text)}
    named = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    assert named and tuple(map(int, named.groups())) >= max(needed)


def test_an_installed_wheel_imports_and_has_its_operators(site, tmp_path):
    say = "import quire, torch; print(quire.__file__, torch.ops.quire.canonical_spec('mxfp8'))"
    environment = os.environ | {"PYTHONPATH": str(site)}
    said = subprocess.check_output([sys.executable, "-c", say], text=True, cwd=tmp_path, env=environment)
    assert said.split() == [str(site / "quire/__init__.py"), "mxfp8"]


def test_the_core_needs_no_torch_and_the_operators_no_python(site):
    core = dynamic_section(site / "quire/lib/libquire.so")
    operators = dynamic_section(operators_of(site) / "libquire_torch.so")
    assert "torch" not in core and "c10" not in core
    assert "[libtorch_cpu.so]" in operators and "python" not in operators


def test_the_binding_takes_the_python_that_loads_it(site):
    if not (binding := operators_of(site) / "quire_python.abi3.so").exists():
        pytest.skip("built without Python's development headers")
    assert "[libpython" not in dynamic_section(binding)


def test_no_library_remembers_where_it_was_built(site):
    beside = ("[$ORIGIN]", "[$ORIGIN/..]", "[$ORIGIN:$ORIGIN/..]")
    for library in (site / "quire/lib").rglob("*.so"):
        paths = [line for line in dynamic_section(library).splitlines() if "RUNPATH" in line or "RPATH" in line]
        assert all(line.endswith(beside) for line in paths), paths


FINDS = """
cmake_minimum_required(VERSION 3.25)
project(finds LANGUAGES CXX)
find_package(quire REQUIRED)
if(TARGET quire::quire_torch)
  get_target_property(links quire::quire_torch INTERFACE_LINK_LIBRARIES)
endif()
message(STATUS "links ${links}")
"""


@pytest.mark.parametrize(
    ("there", "found", "taken"),
    [
        (["2.9", "2.10"], "2.9.1", "2.9"),
        (["2.9", "2.10"], "2.10.0", "2.10"),
        (["2.9", "2.10"], "2.1.0", None),
        (["2.9", "2.10"], None, None),
        (["2.9"], "2.10.0", None),
        (["2.9"], None, "2.9"),
    ],
)
def test_find_package_takes_the_operators_for_the_torch_that_was_found(tmp_path, there, found, taken):
    for minor in there:
        (tmp_path / f"lib/torch-{minor}").mkdir(parents=True)
    configs = tmp_path / "lib/cmake/quire"
    configs.mkdir(parents=True)
    shutil.copy(ROOT / "cmake/quireConfig.cmake", configs)
    (tmp_path / "CMakeLists.txt").write_text(FINDS)
    # What find_package(Torch) leaves.
    torch_found = ["-DTorch_FOUND=ON", f"-DTorch_VERSION={found}"] if found else []
    options = [f"-Dquire_DIR={configs}", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-G", "Ninja", *torch_found]
    said = run(tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", *options)
    (links,) = re.findall(r"-- links (.*)", said) or [""]
    assert re.findall(r"lib/torch-([\d.]+)/libquire_torch.so", links) == ([taken] if taken else [])
    if not taken:
        assert f"are here for {';'.join(sorted(f'torch-{minor}' for minor in there))}" in said


@pytest.fixture(scope="module")
def consumer(site, tmp_path_factory) -> Path:
    """tests/consumer built against the wheel."""
    need_cmake_package()
    folder = tmp_path_factory.mktemp("consumer")
    # A CUDA build of PyTorch insists on a CUDA toolkit in find_package(Torch).
    with_torch = torch.version.cuda is None or shutil.which("nvcc") is not None
    settings = {
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "CMAKE_PREFIX_PATH": f"{site / 'quire'};{torch.utils.cmake_prefix_path}",
        "WITH_TORCH": "ON" if with_torch else "OFF",
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    run(tool("cmake"), "-S", CONSUMER, "-B", folder, "-G", "Ninja", *defines)
    run(tool("cmake"), "--build", folder)
    return folder


def test_a_cmake_project_quantizes_with_the_installed_core(consumer):
    assert run(consumer / "core") == "mxfp8: equal\n"


def test_a_cmake_project_has_a_runner_of_its_own(consumer):
    assert run(consumer / "runs", consumer / "librunner.so") == "consumer.scale: equal\n"


def test_a_program_that_calls_no_operator_by_symbol_stays_linked_to_them(consumer):
    if not (consumer / "operators").exists():
        pytest.skip("this PyTorch is a CUDA build, and without a CUDA toolkit find_package(Torch) fails")
    assert "[libquire_torch.so]" in dynamic_section(consumer / "operators")
    run(consumer / "operators")
