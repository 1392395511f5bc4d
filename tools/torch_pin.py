"""Which PyTorch quire takes, and which one a build uses. Also the hooks by which a wheel asks for the PyTorch that it
was built against. As a program, for CMake: prints the version and the folder of the PyTorch to build against, which an
argument may name."""

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor_, *_ = version.split(".")
    return int(major), int(minor_)


#: The first release of each minor version that quire takes. What a wheel's libraries need of these, later ones have.
RELEASES = ("2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")
OLDEST, NEWEST = minor(RELEASES[0]), minor(RELEASES[-1])
DEFAULT = "2.13.0"  # the one that every change is tested with
RANGE = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)


def installed() -> str | None:
    """The version of the PyTorch that this Python would import."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def wanted() -> str:
    """The version to install where there is none."""
    return os.environ.get("QUIRE_TORCH", DEFAULT)


def suits(version: str | None) -> bool:
    """Whether a build may use this version: the one named by QUIRE_TORCH, else any supported one."""
    if version is None:
        return False
    named = os.environ.get("QUIRE_TORCH")
    return version.split("+")[0] == named if named else OLDEST <= minor(version) <= NEWEST


def here() -> tuple[str, str] | None:
    """The version and the folder of the PyTorch that this Python would import."""
    version, spec = installed(), importlib.util.find_spec("torch")
    return (version, str(Path(spec.origin).parent)) if version and spec and spec.origin else None


def behind_isolation() -> tuple[str, str] | None:
    """The same for the environment that pip builds for. pip runs the environment's own Python and hides its packages by
    these two variables, so without them the Python finds what quire will run with."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    look = [
        sys.executable,
        "-P",
        "-c",
        "import runpy, sys; print(*runpy.run_path(sys.argv[1])['here']() or '', sep=';')",
    ]
    done = subprocess.run([*look, __file__], env=environment, stdout=subprocess.PIPE, text=True)
    version, _, folder = done.stdout.strip().partition(";")
    return (version, folder) if folder else None


def in_folder(folder: str) -> tuple[str, str]:
    """The same for a folder `torch` that nobody imports."""
    said = (Path(folder) / "version.py").read_text()
    return re.search(r"^__version__ = '(.+)'", said, re.MULTILINE)[1], folder


def to_build_against() -> tuple[str, str] | None:
    """The version and the folder of the first PyTorch that suits."""
    return next((found for look in (here, behind_isolation) if (found := look()) and suits(found[0])), None)


def refuse_other_systems() -> None:
    if sys.platform != "linux":
        raise RuntimeError(f"quire runs on Linux only; this is {sys.platform}")


def get_requires_for_dynamic_metadata(settings) -> list[str]:
    """Called by scikit-build-core in an isolated build, which downloads PyTorch only where the environment
    has none that suits."""
    refuse_other_systems()
    return [] if to_build_against() else [f"torch=={wanted()}"]


def dynamic_metadata(settings, project) -> dict[str, str | list[str]]:
    """Called by scikit-build-core: PyTorch's C++ interface changes between minor versions, so a wheel asks for the one
    that it was built against. ./dev wheel sets QUIRE_WHEEL_FOR_ALL for a wheel with operators for every version."""
    refuse_other_systems()
    found = to_build_against()
    if found is None:
        raise RuntimeError(
            f"quire is built against the PyTorch it will run with, {RANGE}; found {installed() or 'none'} for "
            f"{sys.executable}. Install one (pip install torch=={wanted()}), or leave --no-build-isolation out."
        )
    fits = "torch=={}.{}.*".format(*minor(found[0]))
    if "QUIRE_WHEEL_FOR_ALL" in os.environ:
        fits = "torch>={}.{},<{}.{}".format(*OLDEST, NEWEST[0], NEWEST[1] + 1)
    return {"dependencies": [fits, "tqdm"]}


def dynamic_wheel(settings) -> dict[str, bool]:
    """Called by scikit-build-core: a source distribution leaves this to the wheels that are built from it."""
    return {"dependencies": True}


if __name__ == "__main__":
    found = in_folder(sys.argv[1]) if sys.argv[1:] else to_build_against()
    if found is None:
        sys.exit(f"quire: {sys.executable} has no PyTorch {RANGE}")
    print(*found, sep=";")
