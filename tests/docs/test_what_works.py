"""docs/what-works.md is made from the tables of the tests, and what it refuses is refused."""

import importlib.util
from pathlib import Path

import pytest
import torch

import quire

spec = importlib.util.spec_from_file_location("what_works", Path(__file__).with_name("what_works.py"))
what_works = importlib.util.module_from_spec(spec)


@pytest.fixture(scope="module")
def works():
    import sys

    sys.modules["what_works"] = what_works  # which dataclasses look up
    spec.loader.exec_module(what_works)
    return what_works


def test_the_page_is_that_of_the_tables(works):
    assert works.PAGE.read_text() == works.text(), "run: PYTHONPATH=tests:tools python tests/docs/what_works.py"


def test_its_tables_fit_a_phone(works):
    """Three columns of words do, and five do not."""
    lines = [line for line in works.text().splitlines() if line.startswith("|")]
    assert max(len(line.strip("|").split(" | ")) for line in lines) <= 3


def test_each_recipe_with_a_name_has_a_row(works):
    rows = {row.strip("`") for row in works.ROWS if row.startswith("`")}
    assert rows == set(quire.recipe._BY_NAME)
    assert all(name in works.NAMES for names in works.ROWS.values() for name in names)


def test_a_pair_that_is_called_refused_is_refused(works):
    refused = {(column.title, row) for column in works.COLUMNS for row in column.refused}
    assert {row for _, row in refused} == {"`fp8_delayed`"} and len(refused) == 2
    for options in ({}, {"gradients": "input"}):
        with pytest.raises(ValueError, match=r"quire\.autocast"):
            quire.convert(torch.nn.Linear(256, 256), "fp8_delayed", for_inference=True, tokens=None, **options)
    with pytest.raises(ValueError, match=r"quire\.autocast"):
        quire.quantize_model(torch.nn.Sequential(torch.nn.Linear(64, 64)), "fp8_delayed")
