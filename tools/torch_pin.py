"""Which PyTorch quire takes. Also the hook by which a wheel asks for the minor version it was built against."""

import os
from importlib import metadata

OLDEST, NEWEST = (2, 11), (2, 13)
DEFAULT = "2.13.0"


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor_, *_ = version.split(".")
    return int(major), int(minor_)


def installed() -> str | None:
    """The version of the PyTorch that this Python would import."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def suits(version: str | None) -> bool:
    """Whether ./dev may use this version: the one named by QUIRE_TORCH, else any supported one."""
    if version is None:
        return False
    wanted = os.environ.get("QUIRE_TORCH")
    return version.split("+")[0] == wanted if wanted else OLDEST <= minor(version) <= NEWEST


def dynamic_metadata(settings, project) -> dict[str, list[str]]:
    """Called by scikit-build-core: the C++ interface of PyTorch changes between minor versions, so a wheel pins one."""
    version = installed()
    if version is None or not OLDEST <= minor(version) <= NEWEST:
        raise RuntimeError(
            f"quire is built against the PyTorch it will run with, 2.11 to 2.13; found {version or 'none'}. "
            f"Install one (pip install torch=={DEFAULT}), then run pip install --no-build-isolation ."
        )
    return {"dependencies": ["torch=={}.{}.*".format(*minor(version)), "tqdm"]}
