"""Little is written twice: few places share so many lines to the letter. pylint's symilar finds them."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tree

LINES = 8
#: Of places, in all languages together. Those of today are signatures and lists of names.
PAIRS = 5
#: symilar, told by Python itself which lines are imports: pylint's parser reads all modules that a file imports.
SYMILAR = """
import ast
from pylint.checkers import symilar

class Module:
    def __init__(self, text):
        self.tree = ast.parse(text)
    def nodes_of_class(self, _):
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]

symilar.astroid.parse = Module
symilar.Run()
"""
FOUND = re.compile(r"^(\d+) similar lines in \d+ files\n((?:==.*\n)+)", re.MULTILINE)


def similar(root: Path, *options: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    names = [str(path.relative_to(root)) for path in tree.files(root, *suffixes)]
    if len(names) < 2:
        return
    command = [sys.executable, "-c", SYMILAR, f"--duplicates={LINES}", "--ignore-comments", *options, *names]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for lines, places in FOUND.findall(output):
        yield f"{lines} lines: {', '.join(place.strip('=') for place in places.splitlines())}"


def check(root: Path) -> Iterator[str]:
    found = [
        *similar(root, "--ignore-docstrings", "--ignore-imports", suffixes=(".py",)),
        *similar(root, suffixes=tree.CPP),
    ]
    if len(found) > PAIRS:
        yield f"{len(found)} pairs of places share {LINES} lines or more, at most {PAIRS}; give them one place"
        yield from (f"  {pair}" for pair in found)


if __name__ == "__main__":
    tree.main(check)
