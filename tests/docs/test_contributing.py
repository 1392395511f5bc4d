"""CONTRIBUTING.md says where the test of a behaviour is, and that tests lie as what they test."""

import re

#: Folders of tests/python that are no package of quire.
OTHERS = {"compile", "runners"}
#: Modules beside them that tests of all folders use.
MODULES = 10


def test_each_behaviour_has_its_test_in_the_file_that_the_table_names(page, root):
    text = page("CONTRIBUTING.md").text
    rows = re.findall(r"^\| (.+) \| `(tests/\S+\.py)` \| `(test_\w+)` \|$", text, re.MULTILINE)
    assert len(rows) == 10 and len({file for _, file, _ in rows}) == 10
    for behaviour, file, test in rows:
        assert re.search(rf"^def {test}\(", (root / file).read_text(), re.MULTILINE), behaviour


def test_the_folders_of_tests_are_those_of_the_package(page, root):
    folders = {path.parent.name for path in (root / "tests/python").glob("*/test_*.py")}
    packages = {path.parent.name for path in (root / "python/quire").glob("*/__init__.py")}
    assert folders - OTHERS <= packages and packages - folders == set()
    text = page("CONTRIBUTING.md").text
    assert OTHERS <= folders and all(f"`{name}` " in text for name in OTHERS)


def test_few_modules_help_all_tests(root):
    modules = [path.name for path in (root / "tests").glob("*.py") if path.name != "conftest.py"]
    assert len(modules) <= MODULES, modules


def test_every_file_that_the_page_names_exists(page, root):
    named = set(re.findall(r"`(tests/[\w/]+\.(?:py|cpp|h))`", page("CONTRIBUTING.md").text))
    assert len(named) > 20 and [name for name in sorted(named) if not (root / name).exists()] == []
