"""Docstrings of public names: Google style, with every parameter and no other, examples that run, and pages that show
public names alone."""

import dataclasses
import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
import pytest
import torch

import quire

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/api").glob("*.md"))
DIRECTIVE = re.compile(r"^::: (\S+)\n(?:    options:\n      members: \[(.*?)\]\n)?", re.MULTILINE)
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Shape", "Examples")
#: Made by their own functions; their constructors are no part of the interface.
NOT_CONSTRUCTED = {"quire.recipe.Format", "quire.recipe.Recipe", "quire.debug.Statistics"}


def of_name(name: str) -> object:
    found = quire
    for part in name.split(".")[1:]:
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    return found


def shown() -> Iterator[str]:
    """The names that the pages show, with the members of classes."""
    for page in PAGES:
        for name, members in DIRECTIVE.findall(page.read_text()):
            yield name
            yield from (f"{name}.{member}" for member in re.findall(r"\w+", members))


NAMES = sorted(set(shown()))


def parameters(name: str, it: object) -> set[str]:
    if isinstance(it, property) or name in NOT_CONSTRUCTED:
        return set()
    function = getattr(it, "__func__", it)  # of a class method
    listed = inspect.signature(function).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return {stars.get(one.kind, "") + one.name for one in listed} - {"self", "cls"}


def sections(text: str) -> dict[str, list[str]]:
    """Title -> the names of its entries, and under "" other titles."""
    found, title = {"": []}, ""
    for line in text.splitlines():
        if match := re.fullmatch(r"([A-Z]\w+):", line):
            title = match[1]
            found.setdefault(title, [])
            if title not in SECTIONS:
                found[""].append(title)
        elif title and (entry := re.match(r"    (\*{0,2}[\w.]+): \S", line)):
            found[title].append(entry[1])
        elif line and not line.startswith(" "):
            title = ""
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_stands_under_args_and_no_other(name):
    it = of_name(name)
    text = inspect.getdoc(it)
    assert text, name
    found = sections(text)
    assert found[""] == []
    told = found.get("Args", [])
    if name not in NOT_CONSTRUCTED and (dataclasses.is_dataclass(it) or hasattr(it, "_fields")):  # results
        told = told or found.get("Attributes", [])
    assert sorted(told) == sorted(parameters(name, it))
    order = [title for title in SECTIONS if title in found]
    assert [title for title in found if title] == order
    outside = "".join(re.split(r"`[^`]*`|^ *(?:>>>|\.\.\.).*$", text, flags=re.MULTILINE))
    assert "[*" not in outside  # the site would read two asterisks as emphasis
    assert not re.search(r"^(?:Raises|Returns) [A-Z]\w*Error\b", text, re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in NAMES if ">>>" in (inspect.getdoc(of_name(name)) or "")])
def test_the_example_of_a_docstring_runs(name):
    scope = {"torch": torch, "quire": quire}
    (test,) = [one for one in doctest.DocTestFinder(recurse=False).find(of_name(name), name, module=False, globs=scope)]
    said = []
    assert doctest.DocTestRunner().run(test, out=said.append).failed == 0, "".join(said)


def test_the_site_reads_what_the_sections_say():
    """griffe, which mkdocstrings uses, finds the parameters that the tests find."""
    package = griffe.load("quire", search_paths=[ROOT / "python"], docstring_parser="google", allow_inspection=False)
    linear = package["nn.linear.Linear"]
    (listed,) = [part.value for part in linear.docstring.parsed if part.kind.value == "parameters"]
    assert {one.name for one in listed} == parameters("quire.Linear", quire.Linear)
    assert all(one.description and one.annotation is not None for one in listed)
    assert {one.name: str(one.default) for one in listed}["bias"] == "True"


def test_pages_show_no_member_that_only_quire_calls():
    internal = {"own_groups", "first_stream", "take_stream", "check_undivided", "divide_groups", "adopt", "place"}
    assert not internal & {name.rpartition(".")[2] for name in NAMES}
    assert "members: false" in (ROOT / "mkdocs.yml").read_text()  # those of a page are listed there


def test_the_help_of_a_layer_fits_the_screen_of_a_terminal():
    text = inspect.getdoc(quire.Linear)
    assert max(map(len, text.splitlines())) <= 116
    for line in ("Args:", "    in_features: the number of features of x.", "Shape:", "Examples:"):
        assert line in text.splitlines()
