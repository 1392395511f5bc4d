"""docs/design.md is short, and leads to the README.md of each folder, which has the reasons for that folder."""

import re

import pytest

#: What is read in fifteen minutes, at 240 words a minute.
MOST_WORDS = 3600
PAGE = "docs/design.md"
FOLDERS = ("src", "python/quire", "tests")
#: A path of a file in backticks, such as `spec/scale.h`.
FILE = re.compile(r"`([\w/-][\w./-]*\.(?:h|cpp|cu|cuh|py|sh|cmake|md|toml))`")
#: A path of a page without backticks, such as docs/numerics.md 7.4.
BARE = re.compile(r"(?<![\w/`])((?:docs|src|python|tests)/[\w./-]+\.md)")


def reasons(root):
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("README.md"))]


def missing(path, root):
    """The files that the page names and the tree lacks. Paths start at a folder of its own, at one above it, or below
    src."""
    text = path.read_text()
    starts = [path.parent, *(above for above in path.parent.parents if root in (above, *above.parents))]
    starts += [root / "src", root / "src/quire", root / "src/quire_torch", root / "python"]
    named = set(FILE.findall(text)) | set(BARE.findall(text))
    absent = [name for name in named if not any((start / name).exists() for start in starts)]
    return sorted(name for name in absent if not any(path.parent.rglob(name)))


def test_design_is_read_in_fifteen_minutes(page):
    assert 1000 < len(page(PAGE).text.split()) <= MOST_WORDS


def test_design_leads_to_the_reasons_of_every_folder_of_sources(root):
    linked = {(root / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+)", (root / PAGE).read_text())}
    folders = [path for path in reasons(root) if "tests" not in path.relative_to(root).parts]
    assert len(folders) > 15 and [path for path in folders if path.resolve() not in linked] == []


def test_files_that_a_folders_readme_names_exist(root):
    assert {str(path.relative_to(root)): missing(path, root) for path in reasons(root) if missing(path, root)} == {}


@pytest.mark.parametrize(
    "text", ["`absent.h` has it", "see docs/absent.md 1", "`quire/base/absent.cpp`"], ids=["here", "page", "elsewhere"]
)
def test_a_file_that_does_not_exist_is_found(text, tmp_path):
    (tmp_path / "README.md").write_text(text)
    (found,) = missing(tmp_path / "README.md", tmp_path)
    assert "absent" in found


@pytest.mark.parametrize("top", ["python/quire", "src/quire"])
def test_the_map_of_strata_has_every_folder(top, root, page):
    layers = re.search(rf"^ {top}  .*?(?=^ \w|^```)", page(PAGE).text, re.MULTILINE | re.DOTALL)[0]
    named = {word for line in layers.splitlines()[1:] for word in line[:22].split()}
    folders = {path.name for path in (root / top).iterdir() if path.is_dir()} - {"__pycache__", "lib"}
    assert folders - named == set()
