"""Reading the documentation, so that tests can hold it to the truth."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Page:
    """A Markdown file and the parts of it that programs can read."""

    def __init__(self, path: Path):
        self.path = path
        self.text = path.read_text()

    def section(self, heading: str) -> str:
        """What stands between a heading and the next one of any level."""
        found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", self.text, re.MULTILINE | re.DOTALL)
        assert found, f"{self.path.name} has no heading '{heading}'"
        return found[1]

    def rows(self, heading: str) -> list[list[str]]:
        """The cells of the table in a section, without its header."""
        lines = [line for line in self.section(heading).splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def page():
    """page("docs/specs.md") reads a file of the repository."""
    return lambda name: Page(ROOT / name)
