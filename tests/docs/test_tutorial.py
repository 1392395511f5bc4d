"""docs/tutorial.md: its code runs, with few steps, and its notebook is made of the page."""

import json

import pytest
import torch

import tutorial

#: With these it takes seconds; the page has larger ones.
SMALL = {"STEPS, BATCHES, LENGTH = 1000, 20, 64": "STEPS, BATCHES, LENGTH = 4, 1, 32", "count=200": "count=3"}


@pytest.mark.slow
def test_the_code_runs_from_the_first_block_to_the_last(tmp_path, monkeypatch):
    text = tutorial.PAGE.read_text()
    for large, small in SMALL.items():
        assert text.count(large) == 1
        text = text.replace(large, small)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        torch, "compile", lambda function, fullgraph, backend: function
    )  # compile/test_layers.py compiles
    blocks = tutorial.blocks(text)
    printed = tutorial.run(blocks)
    assert len(printed) == len(blocks) > 8
    expected = tutorial.blocks_with_outputs(tutorial.PAGE.read_text())
    assert [bool(output) for output in printed] == [bool(output) for output in expected]
    pictures = {path.name for path in tmp_path.glob("*.svg")}
    assert pictures == {path.name for path in tutorial.DOCS.glob("tutorial-*.svg")}
    assert all(f"]({name})" in text for name in pictures)


def test_the_notebook_is_that_of_the_page():
    text = tutorial.PAGE.read_text()
    assert tutorial.NOTEBOOK.read_text() == tutorial.notebook(text), "run: python tools/tutorial.py --notebook"
    code = [
        "".join(cell["source"]) for cell in json.loads(tutorial.notebook(text))["cells"] if cell["cell_type"] == "code"
    ]
    assert code == [block.strip("\n") for block in tutorial.blocks(text)]


def test_outputs_replace_those_of_the_page():
    page = "a\n\n```python\nx\n```\n\n```text\nold\n```\n\n```python\ny\n```\n\n```text\nold\n```\nb\n"
    assert (
        tutorial.with_outputs(page, ["new", ""])
        == "a\n\n```python\nx\n```\n\n```text\nnew\n```\n\n```python\ny\n```\nb\n"
    )
