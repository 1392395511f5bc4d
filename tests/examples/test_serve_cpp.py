"""examples/serve_cpp, as a user would build it: installed libraries, find_package, a program without Python."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from workspace import ROOT, tool

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples/serve_cpp"
MODELS = ("mxfp8", "nvfp4", "mixture", "runners")
BATCHES = (1, 16, 100)


def run(*command: str | Path) -> str:
    """The output of a command; a failure shows all of it."""
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    run(sys.executable, EXAMPLE / "export.py", folder)
    return folder


def test_a_pure_cpp_program_computes_exactly_what_python_does(exported: Path, serve: Path):
    said = run(serve, exported, *MODELS)
    expected = [f"{model}: batch {batch} -> [{batch}, 32], equal to Python" for model in MODELS for batch in BATCHES]
    assert said.splitlines() == expected


@pytest.mark.parametrize("program", ["serve", "generate"])
def test_the_cpp_programs_link_no_python(serve: Path, program: str):
    names = [line.split()[0] for line in run("ldd", serve.parent / program).splitlines()]
    assert "libquire_torch.so" in names and "libquire.so" in names
    assert [name for name in names if "python" in name] == []


def test_the_cpp_program_notices_an_output_that_differs(exported: Path, serve: Path, tmp_path: Path):
    (tmp_path / "mxfp8.pt2").symlink_to(exported / "mxfp8.pt2")
    cases = torch.load(exported / "mxfp8.cases.pt", weights_only=True)
    cases[1] = torch.nextafter(cases[1], torch.tensor(float("inf")))
    torch.save(cases, tmp_path / "mxfp8.cases.pt")
    done = subprocess.run([serve, tmp_path, "mxfp8"], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "batch 1 -> [1, 32], DIFFERS from Python" in done.stdout


def test_the_cpp_program_says_which_runner_is_not_registered(exported: Path, serve: Path, tmp_path: Path):
    for file in ("runners.pt2", "runners.cases.pt"):
        (tmp_path / file).symlink_to(exported / file)
    done = subprocess.run([serve, tmp_path, "runners"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "nvfp4_moe: no runner has the name 'served.experts'; none is registered" in done.stdout + done.stderr


def test_the_program_of_the_page_runs_and_takes_the_libraries_beside_it(exported: Path, serve: Path, tmp_path: Path):
    """docs/serve-cpp.md: its two files, its commands, and the folder that it says to copy."""
    blocks = re.findall(
        r"^ *```(\w+)\n(.*?)^ *```$", (ROOT / "docs/serve-cpp.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (project,) = [text for language, text in blocks if language == "cmake"]
    (program,) = [text for language, text in blocks if language == "cpp" and "main()" in text]
    (commands,) = [text for language, text in blocks if language == "sh"]
    (tmp_path / "CMakeLists.txt").write_text(textwrap.dedent(project))
    (tmp_path / "main.cpp").write_text(textwrap.dedent(program))
    (tmp_path / "model.pt2").symlink_to(exported / "mxfp8.pt2")
    prefix = serve.parent.parent / "prefix"
    commands = textwrap.dedent(commands).replace("QUIRE;TORCH", f"{prefix};{torch.utils.cmake_prefix_path}")
    path = os.pathsep.join([str(Path(tool("cmake")).parent), os.environ["PATH"]])
    script = ["bash", "-ec", f"cd {tmp_path}\n{commands}"]
    done = subprocess.run(
        script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PATH": path}
    )
    assert done.returncode == 0 and done.stdout.endswith("\n[4, 32]\n"), done.stdout
    (operators,) = prefix.glob("lib/torch-*/libquire_torch.so")
    for library in (operators, prefix / "lib/libquire.so"):
        shutil.copy(library, tmp_path / "build")
    said = run("ldd", tmp_path / "build/serve")
    assert sorted(re.findall(r"=> (\S+/libquire\w*\.so)", said)) == [
        str(tmp_path / f"build/{name}.so") for name in ("libquire", "libquire_torch")
    ]
