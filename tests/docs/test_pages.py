"""The Python of every page runs, top to bottom, and the site is built without a warning."""

import gc
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import bars
import quire
import site_pages

#: What the Python of a page is: each block, also within a list.
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
PAGES = (
    *sorted(f"api/{path.stem}" for path in (Path(__file__).parents[2] / "docs/api").glob("*.md")),
    "formats",
    "get-started",
    "train-and-resume",
    "inference",
    "invariance",
    "language-model",
    "which-recipe",
    "checkpoints",
    "custom-recipes",
    "distributed",
    "troubleshooting",
)
#: Blocks of these are parts of longer programs; tests of their own run what can be run.
OTHERS = {
    "follow-one-call",
    "from-transformer-engine",
    "integrations",
    "lora",
    "moe",
    "observing",
    "runners",
    "tutorial",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAGES)
def test_the_python_of_a_page_runs(name, page, monkeypatch):
    monkeypatch.setattr(quire.conversion.timing, "SECONDS", 0.0)
    blocks = [textwrap.dedent(block) for block in BLOCK.findall(page(f"docs/{name}.md").text)]
    scope = {}
    for block in blocks:
        exec(compile(block, f"docs/{name}.md", "exec"), scope)
    scope.clear()
    gc.collect()  # runners that a page has registered


def test_no_page_has_python_that_no_test_runs(root):
    with_python = {path.stem for path in (root / "docs").glob("*.md") if BLOCK.search(path.read_text())}
    assert with_python - OTHERS - set(PAGES) == set() and OTHERS <= with_python


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded.py", "pipeline.py"])
def test_a_script_for_torchrun_trains_on_two_ranks(root, tmp_path, monkeypatch, name):
    (script,) = re.findall(rf"^```py\n(# {name}.*?)^```", (root / "docs/distributed.md").read_text(), re.S | re.M)
    (tmp_path / name).write_text(script)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(root / "python"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0]  # of one batch


def build(root, folder):
    # Not --quiet, under which strict sees no warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", root / "mkdocs.yml"]
    return subprocess.run([*command, "--site-dir", folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(Path(__file__).parents[2], folder)
    assert done.returncode == 0, done.stdout
    return folder


def test_the_site_is_built_with_every_link_whole(site, root):
    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")} - {"404"}
    pages = (path.relative_to(root / "docs").with_suffix("").as_posix() for path in (root / "docs").rglob("*.md"))
    assert built >= set(pages)


def test_a_link_to_nowhere_is_a_failure(root, tmp_path):
    copy = tmp_path / "copy"
    (copy / "docs").mkdir(parents=True)
    (copy / "docs/index.md").write_text("[nowhere](nowhere.md)\n")
    (copy / "mkdocs.yml").write_text("site_name: copy\nstrict: true\n")
    done = build(copy, tmp_path / "site")
    assert done.returncode == 1 and "'nowhere.md'" in done.stdout


def test_the_search_knows_the_words_of_functions_and_ranks_guides_first(site, root):
    index = json.loads((site / "search/search_index.json").read_text())
    words = re.split(index["config"]["separator"], "quire.Linear [2.13], row-wise")
    assert [word for word in words if word] == ["quire", "Linear", "2.13", "row", "wise"]
    ranks = {doc["location"].split("#")[0]: doc["boost"] for doc in index["docs"]}
    assert ranks["benchmarks-diary.html"] < ranks["api/io.html"] < ranks["lora.html"] == 1 < ranks["formats.html"]
    named = [root / "docs" / name for name in site_pages.BOOSTS]
    assert all(path.is_dir() or path.with_suffix(".md").is_file() for path in named)


def test_the_site_asks_no_other_machine(site):
    pages = [path.read_text() for path in site.rglob("*.html")]
    asked = [address for text in pages for address in re.findall(r'<(?:script|img|link)[^>]*="(https?://[^"]+)"', text)]
    assert len(pages) > 20
    assert [address for address in asked if "squidfunk" not in address] == []


def test_the_picture_of_benchmarks_is_that_of_the_figures(root, tmp_path):
    bars.draw(tmp_path / "benchmarks.svg")
    assert (tmp_path / "benchmarks.svg").read_text() == (root / "docs/benchmarks.svg").read_text()


def test_the_picture_of_results_is_that_of_the_figures(root, tmp_path):
    bars.draw_results(tmp_path / "results.svg")
    assert (tmp_path / "results.svg").read_text() == (root / "docs/results.svg").read_text()
    assert bars.steps_on_gpu()["fp8_current"] == 1.18
