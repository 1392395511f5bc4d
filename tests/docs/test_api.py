"""Every public name stands in the API reference, once, and one of its examples uses it."""

import re
from pathlib import Path

import pytest

import quire

PAGES = sorted((Path(__file__).parents[2] / "docs/api").glob("*.md"))
MODULES = ("debug", "delayed", "distributed", "io", "moe", "recipe", "runners")
#: What layers call of delayed scaling; an example would be a layer.
INSIDE = {f"quire.delayed.{name}" for name in quire.delayed.__all__} - {"quire.delayed.DelayedState"}
SAME = {"quire.delayed.delayed_state", "quire.delayed.set_delayed_state"}
SAME |= {f"quire.runners.{name}" for name in ("nvfp4_linear", "nvfp4_moe", "nvfp4_moe_routed")}


def public(module: str) -> set[str]:
    """The public names of a module of quire: __all__, or those that it defines."""
    found = getattr(quire, module)
    defined = [name for name, it in vars(found).items() if getattr(it, "__module__", "") == found.__name__]
    return {f"quire.{module}.{name}" for name in getattr(found, "__all__", defined) if not name.startswith("_")}


def expected() -> set[str]:
    own = {f"quire.{name}" for name in quire.__all__ if name not in MODULES}
    return own.union(*map(public, MODULES)) - SAME


def documented() -> list[str]:
    return [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]


def test_every_public_name_stands_in_the_reference_once():
    assert sorted(documented()) == sorted(expected())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_example_follows_every_name_and_uses_it(page: Path):
    parts = re.split(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        if name not in INSIDE:
            code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
            assert re.search(rf"\b{name.rpartition('.')[2]}\b", code), f"{name} has no example"


def test_every_public_name_has_a_docstring():
    for name in documented():
        module, _, last = name.rpartition(".")
        found = getattr(quire if module == "quire" else getattr(quire, module.removeprefix("quire.")), last)
        assert found.__doc__, name
