"""Builds toy_ops.cpp with the compiler alone: the operator framework needs PyTorch and nothing of the core."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
TORCH = Path(torch.__file__).parent
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared"]


def build(source: Path, folder: Path) -> Path:
    """The library of `source`, compiled once per content of it, the framework's headers, PyTorch and the flags."""
    compiler = [os.environ.get("CXX", "g++"), *FLAGS]
    content = hashlib.sha256(f"{torch.__version__} {compiler}".encode())
    for file in [source, *sorted((SOURCES / "quire_torch" / "op").glob("*.h"))]:
        content.update(file.read_bytes())
    library = folder / f"{source.stem}-{content.hexdigest()[:16]}.so"
    if not library.exists():
        include = [f"-I{SOURCES}", *(f"-isystem{TORCH}/include{sub}" for sub in ("", "/torch/csrc/api/include"))]
        unfinished = library.with_suffix(f".{os.getpid()}")  # a second pytest may be building the same
        launcher = ["ccache"] if shutil.which("ccache") else []
        link = [f"-L{TORCH}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run([*launcher, *compiler, *include, str(source), "-o", str(unfinished), *link], check=True)
        unfinished.rename(library)
    return library


@pytest.fixture(scope="session")
def toy(request):
    """torch.ops.toy"""
    torch.ops.load_library(build(HERE / "toy_ops.cpp", request.config.cache.mkdir("quire_torch")))
    return torch.ops.toy
