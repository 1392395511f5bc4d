"""What a build needs of a release of PyTorch that is not installed: its headers, and the libraries that are linked."""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from workspace import ROOT, Failure, say

_LINKED = r"torch/lib/(libtorch_cpu|libtorch_python|libc10)\.so|torch/lib/libgomp.*|torch\.libs/libgomp.*"
_NEEDED = re.compile(rf"torch/version\.py|torch/include/.*|{_LINKED}")


def folder_of(release: str, machine: str | None = None) -> Path:
    """The folder `torch` with these parts of a release such as "2.11.0", below build/. machine: such as "aarch64", for
    another kind than this one. Downloads PyTorch's wheel, of which it keeps 0.5 GB, unless the folder is there. Raises
    Failure."""
    kept = ROOT / f"build/pytorch-{release}{f'-{machine}' if machine else ''}"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as made:
            unpack(download(release, Path(made), machine), Path(made) / "parts")
            shutil.move(Path(made) / "parts", kept)
    return kept / "torch"


def download(release: str, to: Path, machine: str | None) -> Path:
    """The wheel of a release, as pip would install it here or on that machine, without what it requires."""
    say(f"downloading PyTorch {release}{f' for {machine}' if machine else ''}, to build against it")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    there = [f"--platform=manylinux_2_28_{machine}"] if machine else []
    if subprocess.run([*pip, *there, "--only-binary=:all:", "--dest", to, f"torch=={release}"]).returncode:
        raise Failure(
            f"cannot download torch=={release}, which the wheel is built against. Is a package index in reach?"
        )
    (found,) = to.glob("torch-*.whl")
    return found


def unpack(wheel: Path, to: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to, [name for name in archive.namelist() if _NEEDED.fullmatch(name)])
