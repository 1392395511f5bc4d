"""docs/runners.md: its programs run, its C++ is the library's that is tested, its error is the one that is raised."""

import re

import pytest
import torch

import quire


def blocks(page, language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.text, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_the_program_runs_and_gives_what_the_tables_say(page):
    program, replacing, functions = blocks(page("docs/runners.md"), "python")
    names = {}
    exec(program, names)
    try:
        assert names["y"].shape == (5, 64) and names["y"].dtype == torch.bfloat16
        exec(replacing, names)
        with torch.no_grad(), quire.autocast(recipe="x=nvfp4,w=nvfp4,dy=nvfp4"):
            expected = quire.convert(torch.nn.Sequential(names["layer"]), min_features=1)(names["x"])
        assert torch.equal(names["y"], expected)
        names["model"][0].handle.close()
        exec(functions, names)
        assert names["y"].shape == (5, 64) and names["z"].shape == (5, 256)
        assert torch.equal(names["y"], names["project"](names["x"]))
    finally:
        names["moe"].close(), names["linear"].close()


def test_the_class_is_the_one_that_is_tested(page, root):
    (snippet,) = blocks(page("docs/runners.md"), "cpp")
    assert snippet in (root / "tests/consumer/runner.cpp").read_text()


def test_the_error_has_the_words_that_it_is_shown_with(page):
    (shown,) = blocks(page("docs/runners.md"), "")
    weight = torch.randn(16, 32)
    stale = quire.runners.register(quire.runners.LinearRunner(weight))
    stale.close()
    with (
        quire.runners.register(quire.runners.MoERunner(torch.randn(2, 16, 16), torch.randn(2, 16, 8)), name="experts"),
        quire.runners.register(quire.runners.LinearRunner(weight), name="head"),
        pytest.raises(RuntimeError) as raised,
    ):
        quire.nvfp4_linear(torch.randn(2, 32).bfloat16(), stale.handle, 16)

    def words(text):
        return re.sub(r"\d+", "N", " ".join(text.split()))

    expected = words(shown).replace("layers.N.experts", "experts")
    assert words(str(raised.value).splitlines()[0]) == expected
