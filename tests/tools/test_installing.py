"""quire comes into an environment without a compiler, and into one whose packages pip hides from the build."""

import hashlib
import json
import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import dev
import torch_pin

MINOR = "{}.{}".format(*torch_pin.minor(torch.__version__))
#: Prints what the bytes of a forward and a backward pass hash to.
PASSES = """
import hashlib, torch, quire
torch.manual_seed(0)
layer, x = quire.Linear(64, 32), torch.randn(16, 64, requires_grad=True)
with quire.autocast(recipe=quire.recipe.NVFP4BlockScaling()):
    y = layer(x)
y.square().sum().backward()
results = torch.cat([t.detach().flatten() for t in (y, x.grad, layer.weight.grad)])
print(hashlib.sha256(bytes(results.view(torch.uint8).tolist())).hexdigest())
"""
#: What pip's isolated builds import before all else: it hides the packages of the environment.
HIDES = "import sys\nsys.path[:] = [path for path in sys.path if not path.endswith('site-packages')]\n"
HOOKS = """
import json, pathlib, sys
from scikit_build_core import build
folder = build.prepare_metadata_for_build_wheel(sys.argv[1]) if len(sys.argv) > 1 else None
metadata = (pathlib.Path(sys.argv[1]) / folder / "METADATA").read_text() if folder else ""
print("HOOKS" + json.dumps([build.get_requires_for_build_wheel(), metadata]))
"""


def link(folder: Path, *distributions: str) -> None:
    """Puts installed distributions, and those that they require, into a folder for packages."""
    waiting, seen = [Requirement(name) for name in distributions], set()
    while waiting:
        wanted = waiting.pop()
        try:
            found = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            continue  # for another platform
        extras = wanted.extras or {""}
        if (key := (found.name, *sorted(extras))) in seen:
            continue
        seen.add(key)
        for part in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (folder / part).exists():
                (folder / part).symlink_to(found.locate_file(part))
        for needed in map(Requirement, found.requires or []):
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)


def environment(folder: Path, *distributions: str) -> Path:
    """The Python of a new environment that has these and nothing else."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    link(site, *distributions)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("with_torch"), "torch", "tqdm")


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("without_torch"))


def said(*command: object, **options) -> str:
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_wheel_needs_no_compiler_and_no_source_tree(with_torch, tmp_path):
    made = dev.wheel(tmp_path / "dist", releases=())
    assert "-cp311-abi3-" in made.name
    pip = [sys.executable, "-m", "pip", "--python", with_torch, "install", "--no-index", "--disable-pip-version-check"]
    bare = {"PATH": str(with_torch.parent), "HOME": str(tmp_path)}
    said(*pip, made, env=bare)
    there = said(with_torch, "-W", "ignore", "-c", PASSES, env=bare, cwd=tmp_path)
    assert there == said(sys.executable, "-W", "ignore", "-c", PASSES, cwd=tmp_path)
    assert len(there.strip()) == len(hashlib.sha256().hexdigest())


@pytest.fixture(scope="module")
def overlay(tmp_path_factory) -> Path:
    """What pip puts on PYTHONPATH of an isolated build: the build's requirements, and what hides all others."""
    folder = tmp_path_factory.mktemp("overlay")
    link(folder, "scikit-build-core")
    (folder / "sitecustomize.py").write_text(HIDES)
    return folder


def isolated(overlay: Path, **variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "QUIRE_TORCH"}
    return inherited | variables | {"PYTHONPATH": str(overlay), "PYTHONNOUSERSITE": "1"}


def hooks(python: Path, environment: dict[str, str], *folder: Path) -> tuple[list[str], str]:
    """What the build asks for, and the metadata of the wheel if there is a folder to write it to."""
    output = said(python, "-c", HOOKS, *folder, env=environment, cwd=dev.ROOT)
    return json.loads(output.split("HOOKS")[1])


def test_an_isolated_build_does_not_miss_the_torch_of_its_environment(with_torch, overlay, tmp_path):
    environment = isolated(overlay)
    requires, text = hooks(with_torch, environment, tmp_path)
    assert not [line for line in requires if line.startswith("torch")]
    assert f"Requires-Dist: torch=={MINOR}.*\n" in text
    version, folder = said(with_torch, "tools/torch_pin.py", env=environment, cwd=dev.ROOT).strip().split(";")
    assert version == metadata.version("torch")
    assert Path(folder).parent == next(with_torch.parents[1].glob("lib/python*/site-packages"))


def test_an_isolated_build_does_not_end_where_there_is_no_torch(without_torch, overlay):
    requires, _ = hooks(without_torch, isolated(overlay))
    assert f"torch=={torch_pin.DEFAULT}" in requires


def test_a_version_that_was_named_is_not_replaced_by_the_one_that_is_there(with_torch, overlay):
    requires, _ = hooks(with_torch, isolated(overlay, QUIRE_TORCH="2.11.5"))
    assert "torch==2.11.5" in requires


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_another_system_is_not_refused_by_its_compiler(system, tmp_path):
    configure = [dev.tool("cmake"), "-S", dev.ROOT, "-B", tmp_path, f"-DCMAKE_SYSTEM_NAME={system}"]
    done = subprocess.run(list(map(str, configure)), capture_output=True, text=True)
    assert done.returncode != 0
    errors = re.findall(r"CMake Error.*?\n\n", done.stderr, re.DOTALL)
    assert len(errors) == 1 and f"quire runs on Linux only; this build is for {system}." in errors[0]


@pytest.mark.parametrize("arguments", [["--help"], ["test", "--help"], ["tset"], []])
def test_asking_for_help_installs_nothing_and_leaves_no_file(arguments, tmp_path):
    for name in ["dev", *(f"tools/{path.name}" for path in (dev.ROOT / "tools").glob("*.py"))]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((dev.ROOT / name).read_bytes())
    before = set(tmp_path.rglob("*"))
    base = {"QUIRE_PYTHON": sys.executable, "PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", tmp_path / "dev", *arguments], env=base, capture_output=True, text=True)
    assert "usage: ./dev" in done.stdout + done.stderr
    assert set(tmp_path.rglob("*")) == before
