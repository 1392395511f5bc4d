"""Plants the bugs of planted_bugs.toml in a copy of the tree and says which of them the tests catch. Run by hand:

    .venv/bin/python tools/planted_bugs.py [--match WORD] [--jobs 2] [--root TREE]

A bug of Python is planted alone. Those of C++ are planted together, each behind a switch that one variable of the
environment turns on, so that the libraries are built once.
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  imported here once for all
import pytest
import torch._dynamo  # noqa: F401

from workspace import ROOT, tool

SWITCH = "QUIRE_PLANTED_BUG"
#: Included by every C++ file that has a bug; `planted` is false while the compiler computes.
HEADER = f"""#pragma once
#include <cstdlib>
#include <type_traits>
namespace quire {{
inline const int kPlantedBug = std::getenv("{SWITCH}") ? std::atoi(std::getenv("{SWITCH}")) : 0;
constexpr bool planted(int bug) {{ return !std::is_constant_evaluated() && bug == kPlantedBug; }}
}}  // namespace quire
"""
IGNORED = shutil.ignore_patterns("build", ".venv", ".git", "__pycache__", ".pytest_cache", "lib")


@dataclass(frozen=True)
class Bug:
    """`old`, which is in `file` once, becomes `new`: in C++ an expression. tests: files for pytest, maybe with -k."""

    number: int
    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def in_cpp(self) -> bool:
        return not self.file.endswith(".py")

    def plant(self, root: Path, new: str) -> str:
        """Writes the file and returns what was in it."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise SystemExit(
                f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}, should have it once"
            )
        (root / self.file).write_text(text.replace(self.old, new))
        return text

    def arguments(self) -> list[str]:
        files, _, words = self.tests.partition(" -k ")
        return ["-x", "-q", "-p", "no:cacheprovider", *(["-k", words] if words else []), *files.split()]


def bugs() -> list[Bug]:
    rows = tomllib.loads((ROOT / "tools/planted_bugs.toml").read_text())["bug"]
    return [Bug(number, **row) for number, row in enumerate(rows, 1)]


def copy_of(root: Path, folder: Path) -> Path:
    shutil.copytree(root, folder, ignore=IGNORED, symlinks=True)
    (folder / "python/quire/lib").symlink_to((root / "python/quire/lib").resolve())
    return folder


def run_tests(bug: Bug, tree: Path, folder: Path) -> str:
    """Whether the tests fail in the tree, which has the bug. In a process of its own, which it changes."""
    path = str(tree / "python")
    os.environ |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | (
        {SWITCH: str(bug.number)} if bug.in_cpp else {}
    )
    sys.path.insert(0, path)
    os.chdir(tree)
    output = folder / f"{bug.number}.out"
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    started = time.monotonic()
    status = int(pytest.main(bug.arguments()))
    said = {0: "NOT CAUGHT", 1: "caught"}.get(status, f"CANNOT TELL (pytest ended with {status})")
    failed = [line for line in output.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status == 1 and failed[0].startswith("ERROR"):
        said = "CANNOT TELL (a test could not begin)"
    first = failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else ""
    return f"{said:<10}  {bug.name}  [{time.monotonic() - started:.0f} s] {first}"


class Child(multiprocessing.context.ForkProcess):
    """A process of a pool that may have children: tests of several ranks start some."""

    daemon = property(lambda self: False, lambda self, value: None)


class WithChildren(multiprocessing.context.ForkContext):
    Process = Child


def run_python(bug: Bug, root: Path, folder: Path) -> str:
    tree = copy_of(root, folder / str(bug.number))
    bug.plant(tree, bug.new)
    try:
        return run_tests(bug, tree, folder)
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def build_cpp(chosen: list[Bug], root: Path, folder: Path) -> Path:
    """A tree with all bugs of C++, built."""
    tree = copy_of(root, folder / "cpp")
    (tree / "src/quire/base/planted.h").write_text(HEADER)
    for bug in chosen:
        bug.plant(tree, f"(quire::planted({bug.number}) ? ({bug.new}) : ({bug.old}))")
    include = '#include "quire/base/planted.h"\n'
    # Files of cpu/generic are in the middle of others, which have their includes elsewhere.
    files = {bug.file for bug in chosen if not bug.file.endswith(".inl.h")} | {"src/quire/cpu/generic/includes.h"}
    for file in files:
        text, once = (tree / file).read_text(), "#pragma once\n"
        (tree / file).write_text(text.replace(once, once + include, 1) if once in text else include + text)
    build = tree / "build/planted"  # as deep as that of ./dev, for caches of compilers
    program = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    configure = [
        tool("cmake"),
        "--preset",
        "cpu-release",
        "-B",
        build,
        program,
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    subprocess.run([*configure, "-DQUIRE_TESTS=OFF"], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    targets = ["quire", "quire_torch", "quire_debug", "quire_python"]
    subprocess.run([tool("cmake"), "--build", build, "--target", *targets, "--", "--quiet"], cwd=tree, check=True)
    (tree / "python/quire/lib").unlink()
    (tree / "python/quire/lib").symlink_to(build / "lib")
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(description="Says which planted bugs the tests catch.")
    parser.add_argument("--match", default="", help="only bugs with this in their name or file")
    parser.add_argument("--jobs", type=int, default=2, help="bugs of Python that run at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree, with its own tests")
    options = parser.parse_args()
    chosen = [bug for bug in bugs() if options.match in f"{bug.name} {bug.file}"]
    lines = []
    with tempfile.TemporaryDirectory(prefix="planted") as name:
        folder, root = Path(name), options.root
        cpp = [bug for bug in chosen if bug.in_cpp]
        tree = build_cpp(cpp, root, folder) if cpp else root
        # Forked, each for one bug, so that PyTorch is imported once.
        with WithChildren().Pool(options.jobs, maxtasksperchild=1) as pool:
            runs = [
                pool.apply_async(
                    *((run_tests, (bug, tree, folder)) if bug.in_cpp else (run_python, (bug, root, folder)))
                )
                for bug in chosen
            ]
            for run in runs:
                lines.append(run.get())
                print(lines[-1], flush=True)
    caught = sum(line.startswith("caught") for line in lines)
    print(f"{caught} of {len(lines)} caught")
    return 0 if caught == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
