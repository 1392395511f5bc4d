"""What import quire says when its libraries do not fit."""

import json
import os
import subprocess
import sys

import pytest
import torch

from quire.loading import library


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    return tmp_path


def built_for(folder, version):
    """The folder of a minor version, as a build against this version leaves it."""
    there = folder / f"torch-{'.'.join(version.split('.')[:2])}"
    there.mkdir()
    (there / "build.json").write_text(json.dumps({"quire": "0.1.0", "torch": version}))
    return there


def test_missing_libraries_are_told_with_the_place_and_the_remedy(folder):
    with pytest.raises(ImportError, match=r"\./dev build") as error:
        library.load()
    assert str(folder) in str(error.value)


def test_another_minor_version_of_torch_is_refused_naming_both(folder):
    built_for(folder, "2.1.2+cpu")
    with pytest.raises(ImportError, match="built against PyTorch 2.1.2") as error:
        library.load()
    assert f"PyTorch {torch.__version__} is running" in str(error.value)
    assert "Install torch==2.1.*" in str(error.value)


@pytest.mark.parametrize("running, taken", [("2.9.0", 0), ("2.9.7+cu130", 0), ("2.10.0a0+git1", 1), ("2.11.2+cpu", 2)])
def test_of_several_builds_that_for_the_running_version_is_taken(folder, monkeypatch, running, taken):
    folders = [built_for(folder, version) for version in ("2.9.1+cpu", "2.10.0", "2.11.0+cu130")]
    monkeypatch.setattr(torch, "__version__", running)
    assert library.folder() == folders[taken]
    assert library.built()["torch"] == ("2.9.1+cpu", "2.10.0", "2.11.0+cu130")[taken]


@pytest.mark.parametrize("running", ["2.1.0", "2.110.0", "3.9.0"])
def test_a_version_that_is_not_among_several_is_told_which_ones_are_there(folder, monkeypatch, running):
    for version in ("2.10.0", "2.9.1+cpu"):
        built_for(folder, version)
    monkeypatch.setattr(torch, "__version__", running)
    with pytest.raises(library.LibraryError) as error:
        library.load()
    said = str(error.value)
    assert f"built against PyTorch 2.9.1+cpu, 2.10.0, but PyTorch {running} is running" in said
    assert "Install torch==2.10.*, or install quire again" in said


def test_a_library_that_does_not_load_is_told_with_the_reason(folder):
    (built_for(folder, torch.__version__) / "libquire_torch.so").write_text("not a library")
    with pytest.raises(ImportError, match="could not load .*libquire_torch.so: .*(header|ELF|file too short)"):
        library.load()


def test_without_the_binding_there_is_none(folder):
    built_for(folder, torch.__version__)
    assert library.direct() is None


def test_importing_says_nothing():
    command = [sys.executable, "-W", "error::UserWarning:quire", "-c", "import quire, logging; logging.shutdown()"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
