"""docs/install.md and the metadata of the package name the versions that the build accepts."""

import re
import tomllib

import pytest

import torch_pin

PAGE = "docs/install.md"
TORCH = [f"{torch_pin.OLDEST[0]}.{minor}" for minor in range(torch_pin.OLDEST[1], torch_pin.NEWEST[1] + 1)]


@pytest.fixture
def project(root) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


@pytest.fixture
def pythons(project) -> list[str]:
    first, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    return [f"3.{minor}" for minor in range(int(first), int(end))]


def test_no_version_of_python_is_accepted_in_one_place_only(project, pythons, page, root):
    classified = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert classified == pythons
    spoken = f"Python {pythons[0]} to {pythons[-1]}"
    assert all(spoken in text for text in (page(PAGE).text, page("README.md").text, (root / "dev").read_text()))
    end = f"(3, {int(pythons[-1].split('.')[1]) + 1})"
    assert f"(3, {pythons[0].split('.')[1]}) <= sys.version_info < {end}" in (root / "dev").read_text()


def test_no_supported_version_of_torch_is_without_a_row_of_what_was_run(page, pythons):
    assert page(PAGE).text.count(f"PyTorch {torch_pin.RANGE}") == 3
    rows = page(PAGE).rows("What was run")
    assert [version for version in TORCH if not any(row[0].startswith(version) for row in rows)] == []
    assert [version for version in pythons if not any(version in row[1] for row in rows)] == []


def test_a_download_is_of_the_version_that_the_page_names(page):
    assert f"pip downloads PyTorch {torch_pin.DEFAULT} for the build" in page(PAGE).text
