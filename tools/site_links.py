"""MkDocs hook: what pages take from files outside of docs/."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: [text](../src/quire/file.h): a file of the repository, which the site does not have.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")
#: <!-- README.md: Title -->: a section of that file.
_SECTION = re.compile(r"<!-- ([\w.]+): (.*?) -->")


def section(file: str, title: str) -> str:
    """The text below the heading "## title", whose links are as from docs/."""
    text = (ROOT / file).read_text().split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return text.replace("](docs/", "](")


def on_page_markdown(markdown: str, **_: object) -> str:
    """The text of a link to a file stays, and the file's path is shown where the pointer rests on it."""
    markdown = _SECTION.sub(lambda found: section(found[1], found[2]), markdown)
    return _OUTSIDE.sub(r'<span title="\2">\1</span>', markdown)
