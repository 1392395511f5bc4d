"""Runs docs/tutorial.md and writes what it prints and draws into the page, then makes docs/tutorial.ipynb of it:

python tools/tutorial.py              runs everything, some minutes on two cores
python tools/tutorial.py --notebook   makes the notebook of the page as it is
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"
#: Python, and the output under it if there is some.
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[str]:
    """The Python of the page, in order."""
    return [found[1] for found in _BLOCK.finditer(text)]


def blocks_with_outputs(text: str) -> list[str]:
    """The output under each block; "" for none."""
    return [found[2] or "" for found in _BLOCK.finditer(text)]


def run(code: list[str]) -> list[str]:
    """What each block prints, when they run in one namespace and in the present folder."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "quire"
    scope: dict[str, object] = {"__name__": "tutorial"}
    printed = []
    for block in code:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(block, "docs/tutorial.md", "exec", dont_inherit=True), scope)
        printed.append("\n".join(line.rstrip() for line in output.getvalue().splitlines()))
    return printed


def with_outputs(text: str, printed: list[str]) -> str:
    rest = iter(printed)

    def one(found: re.Match) -> str:
        output = next(rest)
        return f"```python\n{found[1]}```\n" + (f"\n```text\n{output}\n```\n" if output else "")

    return _BLOCK.sub(one, text)


def notebook(text: str) -> str:
    """The page as a notebook without outputs: cells of text and of code, in the page's order."""
    cells, at = [], 0
    for found in _BLOCK.finditer(text):
        cells += [_cell("markdown", text[at : found.start()]), _cell("code", found[1])]
        at = found.end()
    cells.append(_cell("markdown", text[at:]))
    cells = [{"id": f"cell-{i}", **cell} for i, cell in enumerate(cell for cell in cells if cell["source"])]
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1) + "\n"


def _cell(kind: str, text: str) -> dict[str, object]:
    cell = {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def main() -> None:
    text = PAGE.read_text()
    if sys.argv[1:] != ["--notebook"]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            text = with_outputs(text, run(blocks(text)))
            for picture in Path(folder).glob("*.svg"):
                (DOCS / picture.name).write_text(re.sub(r"\n *<dc:date>.*?</dc:date>", "", picture.read_text()))
        PAGE.write_text(text)
    NOTEBOOK.write_text(notebook(text))


if __name__ == "__main__":
    main()
