"""Misuse that the types forbid. Each file compiles as it stands. With MISUSE defined the compiler must refuse it, in
words that the file announces: `// refused: ...`."""

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
TORCH = Path(torch.__file__).parent
COMPILE = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", f"-I{SOURCES}"]
COMPILE += [f"-isystem{TORCH}/include", f"-isystem{TORCH}/include/torch/csrc/api/include"]


def compiler_output(file, *flags):
    """What the compiler says of a file it refuses; nothing of one that it accepts."""
    done = subprocess.run([*COMPILE, *flags, str(file)], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def digest(file):
    """Of all that the result depends on: a rerun without changes compiles nothing."""
    includes = re.findall(r'^#include "(.+)"$', file.read_text(), re.M)
    framework = all(name.startswith("quire_torch/op/") for name in includes)  # includes nothing else of ours
    content = hashlib.sha256(f"{torch.__version__} {COMPILE}".encode())
    for source in [file, Path(__file__), *sorted((SOURCES / ("quire_torch/op" if framework else "")).rglob("*.h"))]:
        content.update(source.read_bytes())
    return content.hexdigest()


@pytest.mark.parametrize("file", sorted(HERE.glob("*.cpp")), ids=lambda file: file.stem)
def test_only_the_misuse_is_refused(file, request):
    (expected,) = re.findall(r"^// refused: (.+)$", file.read_text(), re.M)
    key, now = f"must_not_compile/{file.stem}", digest(file)
    if request.config.cache.get(key, None) == now:
        return
    assert compiler_output(file) == ""
    refusal = compiler_output(file, "-DMISUSE")
    assert expected in refusal, refusal or f"{file.name} compiles with MISUSE defined"
    request.config.cache.set(key, now)
