"""MkDocs hook: what pages take from files outside of docs/."""

import re

#: [text](../src/quire/file.h): a file of the repository, which the site does not have.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """The text of a link to a file stays, and the file's path is shown where the pointer rests on it."""
    return _OUTSIDE.sub(r'<span title="\2">\1</span>', markdown)
