"""The wheel, as Python and CMake use it once installed. It is made from the build folder of ./dev, so it is quick."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import dev
from quire.loading import library as loaded
from workspace import ROOT, tool

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
    return dev.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with the package in it, as pip would unpack it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def dynamic_section(library: Path) -> str:
    return run("readelf", "--dynamic", library)


def test_a_wheel_serves_every_python_and_pins_the_minor_version_of_torch(wheel, site):
    assert "-cp311-abi3-" in wheel.name
    (metadata,) = site.glob("quire-*.dist-info/METADATA")
    major, minor, *_ = torch.__version__.split(".")
    lines = metadata.read_text().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert any(line.startswith("Version: ") and line.endswith(f"+torch{major}.{minor}") for line in lines)
    has_binding = (site / "quire/lib/quire_python.abi3.so").exists()
    assert has_binding == (loaded.FOLDER / "quire_python.abi3.so").exists()
    assert required == [f"Requires-Dist: torch=={major}.{minor}.*", "Requires-Dist: tqdm"]


def test_an_installed_wheel_imports_and_has_its_operators(site, tmp_path):
    say = "import quire, torch; print(quire.__file__, torch.ops.quire.canonical_spec('mxfp8'))"
    environment = os.environ | {"PYTHONPATH": str(site)}
    said = subprocess.check_output([sys.executable, "-c", say], text=True, cwd=tmp_path, env=environment)
    assert said.split() == [str(site / "quire/__init__.py"), "mxfp8"]


def test_the_core_needs_no_torch_and_the_operators_no_python(site):
    core, operators = (dynamic_section(site / f"quire/lib/lib{name}.so") for name in ("quire", "quire_torch"))
    assert "torch" not in core and "c10" not in core
    assert "[libtorch_cpu.so]" in operators and "python" not in operators


def test_the_binding_takes_the_python_that_loads_it(site):
    if not (binding := site / "quire/lib/quire_python.abi3.so").exists():
        pytest.skip("built without Python's development headers")
    assert "[libpython" not in dynamic_section(binding)


def test_no_library_remembers_where_it_was_built(site):
    for library in (site / "quire/lib").glob("*.so"):
        paths = [line for line in dynamic_section(library).splitlines() if "RUNPATH" in line or "RPATH" in line]
        assert all(line.endswith("[$ORIGIN]") for line in paths), paths


@pytest.fixture(scope="module")
def consumer(site, tmp_path_factory) -> Path:
    """tests/consumer built against the wheel."""
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
