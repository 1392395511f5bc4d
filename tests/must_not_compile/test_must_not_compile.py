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


FILES = sorted(HERE.glob("*.cpp"))
INCLUDE = re.compile(r'^#include "(.+)"$', re.M)


def together():
    """All files as one, each in a namespace of its name. Nearly all of the time is that of the headers."""
    includes = sorted({name for file in FILES for name in INCLUDE.findall(file.read_text())})
    spaces = [f'namespace {file.stem} {{\n#include "{file}"\n}}\n' for file in FILES]
    return "".join([*(f'#include "{name}"\n' for name in includes), *spaces])


def compiler_output(*flags):
    """What the compiler says of files that it refuses; nothing of those that it accepts."""
    command = [*COMPILE, *flags, "-x", "c++", "-"]
    done = subprocess.run(command, input=together(), capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def digest():
    """Of all that the result depends on: a rerun without changes compiles nothing."""
    framework = all(line.startswith("quire_torch/op/") for file in FILES for line in INCLUDE.findall(file.read_text()))
    content = hashlib.sha256(f"{torch.__version__} {COMPILE}".encode())
    headers = sorted((SOURCES / ("quire_torch/op" if framework else "")).rglob("*.h"))  # includes nothing else of ours
    for source in [*FILES, Path(__file__), *headers]:
        content.update(source.read_bytes())
    return content.hexdigest()


def is_refused(name, expected, said):
    """Whether an error with the expected words is about what is in this file's namespace."""
    return re.search(rf"\b{name}::((?! error: ).)* error: static assertion failed: {re.escape(expected)}", said, re.S)


def test_only_the_misuse_is_refused(request):
    key, now = "must_not_compile", digest()
    if request.config.cache.get(key, None) == now:
        return
    assert compiler_output() == ""
    said = compiler_output("-DMISUSE")
    for file in FILES:
        (expected,) = re.findall(r"^// refused: (.+)$", file.read_text(), re.M)
        assert is_refused(file.stem, expected, said), f"{file.name} compiles with MISUSE defined, or:\n{said}"
    request.config.cache.set(key, now)
