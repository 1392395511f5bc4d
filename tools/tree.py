"""Which files the checks read. A check is run as `python tools/check_x.py [ROOT]` and prints one line per finding."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

#: C++ and CUDA.
CPP = (".h", ".cpp", ".hpp", ".cu", ".cuh")
SKIPPED = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis", ".pytest_cache", ".ruff_cache"}


def files(root: Path, *suffixes: str) -> Iterator[Path]:
    """The files below root in order, without what is built or installed; links are not followed."""
    for path in sorted(root.iterdir()):
        if path.is_symlink() or path.name in SKIPPED:
            continue
        if path.is_dir():
            yield from files(path, *suffixes)
        elif not suffixes or path.suffix in suffixes:
            yield path


def main(check: Callable[[Path], Iterator[str]]) -> None:
    """Runs a check over the tree named on the command line, by default this one. Exits 1 if it found something."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    findings = list(check(root))
    print("".join(f"{finding}\n" for finding in findings), end="", file=sys.stderr)
    sys.exit(bool(findings))
