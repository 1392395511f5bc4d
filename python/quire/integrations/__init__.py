"""quire in other libraries (docs/integrations.md). Each module imports its library when it is called, not before, by
needed()."""

from __future__ import annotations

import importlib
from types import ModuleType


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
