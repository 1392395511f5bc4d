"""python -m quire.info --check: the golden vectors on a device, as a table."""

import json
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from quire import info
from quire.golden import comparison
from quire.golden.cases import SPEC_OF


def lines(device, capsys, *arguments):
    """The exit status, and the lines of the table, by family."""
    status = info.main(["--check", "--device", str(device), *arguments])
    out = capsys.readouterr().out.splitlines()
    return status, out


def test_every_vector_is_met_on_the_device(device, capsys):
    status, out = lines(device, capsys)
    assert status == 0 and out[0] == f"golden vectors on {device}"
    rows = {row[0]: [int(number) for number in row[1:]] for row in (line.split() for line in out[2:])}
    assert set(rows) == {*SPEC_OF, "all"} and all(differing == 0 for _, _, differing in rows.values())
    for column in range(2):
        assert rows["all"][column] == sum(row[column] for name, row in rows.items() if name != "all") > 0
    # As many as golden/test_quantize.py asks for, of megabytes.
    assert all(vectors >= 8 for vectors, _, _ in rows.values()) and rows["all"][1] > 1_000_000


def test_python_before_3_11_4_unpacks_the_vectors(tmp_path, monkeypatch):
    extract = tarfile.TarFile.extractall
    monkeypatch.delattr(tarfile, "data_filter")
    # The parameters that it has there: no filter.
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path: extract(self, path, filter="fully_trusted"))
    comparison.unpack(tmp_path)
    assert (tmp_path / "manifest.json").exists()


@pytest.fixture
def corrupted(golden, tmp_path, monkeypatch):
    """Changes one byte of a tensor of a vector, where this process finds the vectors; returns its case and name."""
    folder = tmp_path / "golden"
    comparison.unpack(folder)
    case = next(case for case in golden.cases("mxfp8") if "codes_row" in case)
    entries = json.loads((folder / "manifest.json").read_text())["cases"]
    tensor = next(entry for entry in entries if entry["id"] == case.id)["tensors"]["codes_row"]
    path = folder / tensor["file"]
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[tensor["offset"] + 5] ^= 1
    path.write_bytes(data)
    with tarfile.open(tmp_path / "golden.tar.gz", "w:gz", compresslevel=1) as archive:
        for one in sorted(folder.iterdir()):
            archive.add(one, one.name)
    shutil.rmtree(folder)
    monkeypatch.setattr(comparison, "VECTORS", tmp_path / "golden.tar.gz")
    return case.id


def test_a_vector_that_differs_is_named(corrupted, device, capsys):
    status, out = lines(device, capsys)
    assert status == 1
    assert next(line for line in out if line.startswith("  mxfp8 ")).split()[-1] == "1"
    size = r"\d+"
    assert re.fullmatch(rf"  {re.escape(corrupted)}: codes_row under mxfp8\S*: 1 of {size} bytes differ", out[-1])
    assert next(line for line in out if line.startswith("  all ")).split()[-1] == "1"


def test_it_says_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(comparison, "VECTORS", tmp_path / "golden.tar.xz")
    status, out = lines("cpu", capsys)
    assert status == 2 and len(out) == 1 and out[0].startswith("the golden vectors are not installed: no ")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "numpy", None)
    status, out = lines("cpu", capsys)
    assert status == 2 and out == [
        "the golden vectors are read with NumPy, which is not installed; python -m pip install numpy"
    ]


@pytest.mark.parametrize("name", ["meta", "none"])
def test_a_device_without_kernels_is_named(name, capsys):
    status, out = lines(name, capsys)
    assert status == 2 and len(out) == 1 and out[0].startswith(f"{name} cannot compute them: ")


def test_the_vectors_are_part_of_the_package():
    package = Path(info.__file__).parent
    assert comparison.VECTORS.is_relative_to(package) and os.path.getsize(comparison.VECTORS) < 6_000_000
