"""Finds and loads the operator library, and explains a failure in words."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import torch

#: Holds libquire.so, libquire_torch.so, libquire_debug.so, quire_python.abi3.so and build.json. In a source tree it is
#: a link into the build folder.
FOLDER = Path(__file__).parents[1] / "lib"


class LibraryError(ImportError):
    """quire's libraries are missing, or do not fit the PyTorch that is running."""


def built() -> dict[str, str]:
    """The versions of "quire" and of the "torch" that it was built against. Raises LibraryError."""
    try:
        return json.loads((FOLDER / "build.json").read_text())
    except FileNotFoundError:
        raise LibraryError(
            f"quire: no libraries in {FOLDER}. In a source tree run ./dev build; otherwise install quire again."
        ) from None


def load() -> None:
    """Loads the operators into torch.ops.quire. Loading twice does nothing. Raises LibraryError."""
    versions = built()
    if _minor(versions["torch"]) != _minor(torch.__version__):
        fits = _minor(versions["torch"])
        raise LibraryError(
            f"quire {versions['quire']} was built against PyTorch {versions['torch']}, but PyTorch {torch.__version__} "
            f"is running, and C++ operators fit one minor version only. Install torch=={fits}.*, or install quire "
            "again from its sources, which builds it for this PyTorch (docs/install.md; in a source tree: ./dev build)."
        )
    for name in ("libquire_torch.so", "libquire_debug.so"):
        _load(name, versions)


def _load(name: str, versions: dict[str, str]) -> None:
    library = FOLDER / name
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise LibraryError(
            f"quire {versions['quire']}: PyTorch {torch.__version__} could not load {library}: "
            f"{error.__cause__ or error}. "
            "Build or install quire again; if that does not help, report it with this message."
        ) from error


def direct() -> ModuleType | None:
    """The module of src/quire_python; None where quire was built without it, for want of Python's headers."""
    path = FOLDER / "quire_python.abi3.so"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("quire_python", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _minor(version: str) -> str:
    """ "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])
