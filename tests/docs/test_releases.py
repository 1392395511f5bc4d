"""docs/releases.md, CHANGELOG.md, the workflows and the issue forms agree with the build."""

import re

import quire
import torch_pin

WORKFLOWS = ".github/workflows"


def test_the_changelog_begins_with_the_version_of_the_build(root):
    first = re.search(r"^## (\S+) \((not released yet|\d{4}-\d\d-\d\d)\)$", (root / "CHANGELOG.md").read_text(), re.M)
    assert first and first[1] == quire.__version__


def test_the_version_is_written_in_one_place(root):
    (version,) = re.findall(r"project\(quire VERSION (\S+)", (root / "CMakeLists.txt").read_text())
    assert version == quire.__version__
    sources = [root / "pyproject.toml", *(root / "tools").glob("*.py"), *(root / "python/quire").rglob("*.py")]
    assert [path.name for path in sources if f'"{version}"' in path.read_text()] == []


def test_workflows_run_commands_of_dev_only(root):
    files = sorted((root / WORKFLOWS).glob("*.yml"))
    commands = {path.stem: re.findall(r"run: (.+)", path.read_text()) for path in files}
    assert commands == {
        "docs": ["./dev docs"],
        "test": ["./dev test --torch ${{ matrix.torch }}"],
        "wheel": ["./dev wheel", "./dev wheel --arm"],
    }


def test_the_tests_run_with_each_version_of_pytorch(root):
    (listed,) = re.findall(r"torch: \[(.+)\]", (root / WORKFLOWS / "test.yml").read_text())
    assert listed == ", ".join(f'"{release}"' for release in torch_pin.RELEASES)


def test_a_report_of_an_error_has_the_output_of_info(root):
    form = (root / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    (info,) = [part for part in form.split("- type: ") if "id: info" in part]
    assert "python -m quire.info" in info and "required: true" in info
