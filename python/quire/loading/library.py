"""Finds and loads the operator library, and explains a failure in words."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import torch

#: Holds libquire.so, and for each minor version of PyTorch that quire was built for a folder such as torch-2.13 with
#: libquire_torch.so, libquire_debug.so, quire_python.abi3.so and build.json. In a source tree it is a link into the
#: build folder.
FOLDER = Path(__file__).parents[1] / "lib"


class LibraryError(ImportError):
    """quire's libraries are missing, or do not fit the PyTorch that is running."""


def folder() -> Path:
    """Where the operators for the PyTorch that is running lie. Raises LibraryError."""
    fitting = FOLDER / f"torch-{_minor(torch.__version__)}"
    if (fitting / "build.json").exists():
        return fitting
    others = sorted(FOLDER.glob("torch-*/build.json"), key=_order)
    if not others:
        raise LibraryError(
            f"quire: no libraries in {FOLDER}. In a source tree run ./dev build; otherwise install quire again."
        )
    versions = [json.loads(path.read_text()) for path in others]
    there = ", ".join(one["torch"] for one in versions)
    raise LibraryError(
        f"quire {versions[-1]['quire']} was built against PyTorch {there}, but PyTorch {torch.__version__} is running, "
        f"and C++ operators fit one minor version only. Install torch=={_minor(versions[-1]['torch'])}.*, or install "
        "quire again: a newer release, or its sources, which builds it for this PyTorch (docs/install.md; in a source "
        "tree: ./dev build)."
    )


def built() -> dict[str, str]:
    """The versions of "quire" and of the "torch" that its operators were built against. Raises LibraryError."""
    return json.loads((folder() / "build.json").read_text())


def load() -> None:
    """Loads the operators into torch.ops.quire. Loading twice does nothing. Raises LibraryError."""
    versions = built()
    for name in ("libquire_torch.so", "libquire_debug.so"):
        _load(name, versions)


def _load(name: str, versions: dict[str, str]) -> None:
    library = folder() / name
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
    path = folder() / "quire_python.abi3.so"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("quire_python", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _minor(version: str) -> str:
    """ "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])


def _order(path: Path) -> tuple[int, ...]:
    """(2, 13) of lib/torch-2.13/build.json."""
    return tuple(int(number) for number in re.findall(r"\d+", path.parent.name))
