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
    (folder / "build.json").write_text(json.dumps({"quire": "0.1.0", "torch": version}))


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


def test_a_library_that_does_not_load_is_told_with_the_reason(folder):
    built_for(folder, torch.__version__)
    (folder / "libquire_torch.so").write_text("not a library")
    with pytest.raises(ImportError, match="could not load .*libquire_torch.so: .*(header|ELF|file too short)"):
        library.load()


def test_without_the_binding_there_is_none(folder):
    assert library.direct() is None


def test_importing_says_nothing():
    command = [sys.executable, "-W", "error::UserWarning:quire", "-c", "import quire, logging; logging.shutdown()"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
