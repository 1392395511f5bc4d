"""quire in other libraries (docs/integrations.md). Each module imports its library when it is called, not before, by
needed()."""

from __future__ import annotations

import importlib
from types import ModuleType

from quire.checks import near

#: The modules that are imported when they are first used.
_LATER = ("lightning", "peft", "torchtitan", "transformers", "vllm")


def __getattr__(name: str) -> ModuleType:
    """A module of this package. Raises ImportError, as importing it, if it needs a library that is not there."""
    if name in _LATER:
        return importlib.import_module(f"quire.integrations.{name}")
    raise AttributeError(f"module 'quire.integrations' has no attribute {name!r}{near(name, _LATER)}", name=name)


def needed(caller: str, package: str, pinned: str) -> ModuleType:
    """The package, imported. Raises ImportError, which says what to install, if it is not there. pinned: a version that
    is known to work."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise ImportError(
            f"{caller} needs the package {name}, which cannot be imported ({error}); pip install '{name}=={pinned}'",
            name=name,
        ) from error
