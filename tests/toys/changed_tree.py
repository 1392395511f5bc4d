"""The tree's sources with a line more here and there, and what a compiler says of them."""

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O0", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
#: Messages with plain quotes.
ENGLISH = os.environ | {"LC_ALL": "C"}


def change(folder: Path, name: str, *insertions: tuple[str, str]) -> None:
    """A copy in `folder` of one source, in which each (line, text) puts the text before that line."""
    text = (SOURCES / name).read_text()
    for line, inserted in insertions:
        assert text.count(line) == 1, f"the test expects this once in {name}: {line}"
        text = text.replace(line, inserted + line)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def compiler_output(folder: Path, *arguments: object) -> str:
    """What it says of sources that it refuses; nothing of others. Files in `folder` come before the tree's."""
    command = [COMPILER, *FLAGS, f"-I{folder}", f"-I{SOURCES}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENGLISH)
    return done.stderr or "the compiler failed without a word" if done.returncode else ""


def compile_all(folder: Path, files: list[Path], *flags: object) -> list[Path]:
    """The object files of C++ files, two compilers side by side; fails with their messages."""
    objects = [folder / f"{file.parent.name}_{file.stem}.o" for file in files]
    with ThreadPoolExecutor(2) as pool:
        pairs = zip(files, objects, strict=True)
        said = list(pool.map(lambda pair: compiler_output(folder, *flags, "-c", pair[0], "-o", pair[1]), pairs))
    assert not any(said), "\n".join(said)
    return objects


def source(folder: Path, name: str) -> Path:
    """Of the changed sources if it is one of them, else the tree's."""
    return folder / name if (folder / name).exists() else SOURCES / name


def digest(pattern: str, *folders: str) -> str:
    """Of all that a toy depends on: a rerun without changes compiles nothing."""
    content = hashlib.sha256(f"{COMPILER} {FLAGS}".encode())
    sources = [path for folder in ("quire", *folders) for path in sorted((SOURCES / folder).rglob("*.*"))]
    own = [path for path in sorted(HERE.rglob(pattern)) if path.suffix in (".py", ".h", ".cpp")]
    for path in [Path(__file__), *own, *sources]:
        content.update(path.read_bytes())
    return content.hexdigest()
