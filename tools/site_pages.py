"""MkDocs hook: what pages take from files outside of docs/, and how the search ranks them."""

import re

#: [text](../src/quire/file.h): a file of the repository, which the site does not have.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")
#: Page or folder -> factor of its rank in the search. The search counts a word in a heading 1000 times, so with 0.001 a
#: guide with the word in its text comes before a specification with the word in a heading.
BOOSTS = dict.fromkeys(("benchmarks-diary", "defects-we-do-not-have", "numerics", "design", "follow-one-call"), 0.001)
BOOSTS |= {"releases": 0.1, "from-transformer-engine": 0.1, "distributed-reference": 0.1, "api": 0.5, "index": 0.3}
BOOSTS |= {"which-recipe": 1.5, "formats": 3, "distributed": 1.5, "api/layers": 3}


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """Ranks the page. The text of a link to a file stays; the path is shown where the pointer rests on it."""
    name = page.file.src_uri.removesuffix(".md")
    page.meta["search"] = {"boost": BOOSTS.get(name, BOOSTS.get(name.split("/")[0], 1))}
    return _OUTSIDE.sub(r'<span title="\2">\1</span>', markdown)
