"""python -m quire.info --check: the golden vectors on a device, as a table."""

import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quire.loading.devices import fastest

#: Beside this module; 5.5 MB.
VECTORS = Path(__file__).with_name("golden.tar.xz")


@dataclass
class Family:
    """What was compared of one group of vectors."""

    name: str
    vectors: int = 0
    size: int = 0
    differing: int = 0
    wrong: list[str] = field(default_factory=list)


def families(device: torch.device | str, folder: Path) -> list[Family]:
    """Compares all vectors in a folder with what the device computes."""
    from quire.golden.cases import SPEC_OF, Golden, compared

    golden, found = Golden(folder), []
    for group in SPEC_OF:
        family = Family(group)
        for case in golden.cases(group):
            results = list(compared(case, group, device))
            family.vectors += bool(results)
            family.size += sum(one.size for one in results)
            family.differing += sum(one.differing for one in results)
            family.wrong += [f"{r.what}: {r.differing} of {r.size} bytes differ" for r in results if r.differing]
        found.append(family)
    return found


def table(found: list[Family]) -> list[str]:
    """Lines, the names of vectors that differ last."""
    total = Family("all", *(sum(getattr(f, name) for f in found) for name in ("vectors", "size", "differing")))
    lines = [f"{'family':<16}{'vectors':>9}{'bytes compared':>16}{'differing':>11}"]
    lines += [f"{f.name:<16}{f.vectors:>9}{f.size:>16}{f.differing:>11}" for f in [*found, total]]
    return lines + [line for f in found for line in f.wrong]


def unpack(folder: str | Path) -> None:
    """Writes the files of the vectors into a folder."""
    with tarfile.open(VECTORS) as archive:
        # Not the argument `filter`, which Python before 3.11.4 does not have.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def main(device: torch.device | str | None = None) -> int:
    """Prints the table of a device, by default CUDA's if there is one. Returns 0 if nothing differs, 1 if something
    does, 2 if nothing could be compared."""
    device = device or fastest()
    if not VECTORS.exists():
        print(f"the golden vectors are not installed: no {VECTORS}; install quire from its sources or its wheel")
        return 2
    try:
        import numpy  # noqa: F401, the reader's
    except ImportError:
        print("the golden vectors are read with NumPy, which is not installed; python -m pip install numpy")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        unpack(folder)
        try:
            found = families(torch.device(device), Path(folder))
        except (RuntimeError, AssertionError) as error:
            print(f"{device} cannot compute them: {str(error).splitlines()[0]}")
            return 2
    print(f"golden vectors on {device}", *(f"  {line}" for line in table(found)), sep="\n")
    return int(any(family.differing for family in found))
