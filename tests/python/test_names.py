"""What `import quire` gives: the public names and nothing else, and help where a name is wrong."""

import subprocess
import sys
import types

import pytest

import quire

MODULES = {"debug", "delayed", "distributed", "functional", "info", "io", "moe", "nn", "recipe", "runners"}


def test_only_public_names_are_listed():
    assert [name for name in dir(quire) if name.startswith("_")] == ["__version__"]
    names = {name for name in dir(quire) if name != "te"}  # which is imported when it is asked for
    assert {name for name in names if isinstance(getattr(quire, name), types.ModuleType)} <= MODULES
    assert set(quire.__all__) <= set(dir(quire)) and not {"library", "transforms", "loading", "difflib"} & set(
        dir(quire)
    )


def test_modules_that_the_docs_name_are_there_after_the_import():
    code = f"import quire; print(*[getattr(quire, name).__name__ for name in {sorted(MODULES)}])"
    found = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert found == [f"quire.{name}" for name in sorted(MODULES)]


@pytest.mark.parametrize(("wrong", "near"), [("autocst", "autocast"), ("linear", "Linear"), ("quantise", "quantize")])
def test_a_wrong_name_suggests_the_near_one(wrong, near):
    with pytest.raises(AttributeError, match=f"has no attribute '{wrong}'; did you mean '{near}'"):
        getattr(quire, wrong)


def test_a_name_that_is_like_none_suggests_nothing():
    with pytest.raises(AttributeError, match="has no attribute 'zzzz'$"):
        getattr(quire, "zz" * 2)
    assert not hasattr(quire, "__wrapped__")
