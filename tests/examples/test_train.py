"""The training example, run through its command line, in processes of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forks import Program, as_torchrun

pytestmark = pytest.mark.slow

for needed in ("tqdm", "matplotlib"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"examples/train needs {needed}", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train" / "train.py"
#: One layer has every kind of matmul and of norm.
SIZE = "--layers 1 --width 128 --seq 32 --batch 4 --steps 6 --validation-batches 2".split()
#: Most of the time is that of compiling: distributed/test_graphs.py compiles such graphs with Inductor.
EAGER = (*SIZE, "--dtype", "fp32", "--backend", "aot_eager")
MIXTURE = ("--moe", 4)
RECIPES = ("baseline", "fp8_delayed", "nvfp4")
SECONDS = 1800


def train(*arguments: object, missing: str = "") -> subprocess.CompletedProcess:
    """The finished process; its output is text, whatever bytes a model may have printed."""
    return Program(SCRIPT, *arguments, missing=missing).finished(SECONDS)


def train_as_a_user(*arguments: object) -> subprocess.CompletedProcess:
    """The same from a shell."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", timeout=SECONDS)


def train_as_torchrun(processes: int, *arguments: object) -> list[subprocess.CompletedProcess]:
    """The same in several processes."""
    return as_torchrun(SCRIPT, processes, *arguments, seconds=SECONDS)


def printed_by(*processes: subprocess.CompletedProcess) -> str:
    """What they printed; they must have succeeded."""
    assert not any(process.returncode for process in processes), "\n".join(process.stderr for process in processes)
    return "".join(process.stdout for process in processes)


def train_successfully(*arguments: object) -> str:
    return printed_by(train(*arguments))


def assert_explained(process: subprocess.CompletedProcess, *words: str) -> None:
    """It failed with a message of its own that has all of `words`, not with a traceback."""
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
    message = process.stderr.strip().splitlines()[-1]
    assert message.startswith("train: ")
    for word in words:
        assert word in message


def runs_of(out: Path) -> dict[str, dict]:
    return {run["recipe"]: run for run in json.loads((out / "results.json").read_text())["runs"]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the terminal output of one uninterrupted run of RECIPES."""
    out = tmp_path_factory.mktemp("finished")
    return out, train_successfully(*EAGER, "--recipe", ",".join(RECIPES), "--out", out)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Likewise, of a mixture of experts."""
    out = tmp_path_factory.mktemp("mixture")
    return out, train_successfully(*EAGER, *MIXTURE, "--recipe", "baseline,nvfp4", "--out", out)


#: What a rank sends to the other in a gather of x or dy: half of 128 tokens, each of 128 values. Float32 numbers are
#: sent 6 times: x of the two column layers, in forward and again in backward, and dy of the two row layers. Codes of 4
#: bits with a scale for 16 of them are sent 8 times, because those of dy differ in both directions.
VALUES = 64 * 128
#: What is sent only with codes, in bytes: in each of four layers, 4 amaxes in forward and 2 in backward; and the
#: gradients of two biases, which the baseline sums after gathering.
EXCHANGED = 4 * (4 + 2) * 4 + 2 * 128 * 4


def assert_alike(losses: list[float], others: list[float]) -> None:
    """They differ by less than half of what a step changes. A run that leaves a step out differs by a whole one. There
    is no bound of roundings: a sum that differs in its last bit can be rounded to another code, and each step amplifies
    what the last one changed."""
    step = (others[0] - others[-1]) / (len(others) - 1)
    assert step > 0 and losses == pytest.approx(others, rel=0, abs=step / 2)


def assert_losses_of_one(losses: dict[str, list[float]], alone: dict[str, dict], parallel: str) -> None:
    if "baseline" in losses:
        # Sums of float32 in another order. There is no bound of roundings: AdamW divides by the size of the gradient,
        # so where that is only what roundings leave, a weight moves by a whole step in either direction. The losses of
        # this run differ by 2e-7, and those of the two recipes by 3e-4 or more.
        assert losses["baseline"] == pytest.approx(alone["baseline"]["losses"], rel=1e-5)
    if "nvfp4" in losses:
        assert_alike(losses["nvfp4"], alone["nvfp4"]["losses"])
        # The first loss comes of codes that are those of one process, unless batches are divided, so that processes
        # quantize tokens of their own. It is a mean of 128 positive float32 numbers in another order.
        if parallel in ("tp", "sp"):
            assert losses["nvfp4"][0] == pytest.approx(alone["nvfp4"]["losses"][0], rel=128 * 2**-24)


# A baseline and a resumed run where they tell most, and one that torchrun starts.
@pytest.mark.parametrize(
    ("processes", "parallel", "recipes", "stops"),
    [
        (2, "tp", ("nvfp4",), False),
        (2, "sp", ("baseline", "nvfp4"), False),
        (2, "fsdp", ("nvfp4",), False),
        (4, "tp+fsdp", ("baseline",), True),
        (2, "ep", ("nvfp4",), False),
    ],
)
def test_several_processes_come_to_the_losses_of_one(
    processes: int,
    parallel: str,
    recipes: tuple[str, ...],
    stops: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    moe = MIXTURE if parallel == "ep" else ()
    alone = runs_of(request.getfixturevalue("mixture" if moe else "finished")[0])
    options = ("--recipe", ",".join(recipes), "--processes", processes, "--parallel", parallel, "--out", tmp_path)
    parts = (("--stop-after", 3), ("--resume",)) if stops else ((),)
    printed = ""
    for part in parts:
        arguments = (*EAGER, *moe, *options, *part)
        run = [train(*arguments)] if parallel == "tp" else train_as_torchrun(processes, *arguments)
        printed += printed_by(*run)
    said = f"baseline in fp32, {processes} processes ({parallel}) of"
    assert printed.count(said) == len(parts), "one process alone prints"
    found = runs_of(tmp_path)
    assert tuple(found) == recipes
    assert_losses_of_one({name: run["losses"] for name, run in found.items()}, alone, parallel)
    for name, result in found.items():
        assert result["train_graphs"] == result["validation_graphs"] == 1 and result["graph_breaks"] == 0
        assert result["saved_activation_bytes"] < alone[name]["saved_activation_bytes"]
        assert result["wire_bytes"] > 0 and alone[name]["wire_bytes"] == 0
    if parallel == "sp":  # codes are gathered
        saved = found["baseline"]["wire_bytes"] - found["nvfp4"]["wire_bytes"]
        assert saved == 6 * VALUES * 4 - (8 * VALUES * 9 // 16 + EXCHANGED)
    if stops:
        assert_explained(train("--sample", "--recipe", recipes[0], "--out", tmp_path), "are those of several processes")


def test_results_tell_what_was_trained_on_what(finished: tuple[Path, str]) -> None:
    out, printed = finished
    results = json.loads((out / "results.json").read_text())
    assert results["settings"]["steps"] == 6
    assert "this takes about" in printed.splitlines()[2]
    assert results["settings"]["dtype"] in ("bf16", "fp32")
    assert results["data"]["train_files"] > results["data"]["validation_files"] > 0
    assert len(results["data"]["sha256"]) == 64
    assert results["data"]["sha256"][:16] in printed
    assert tuple(run["recipe"] for run in results["runs"]) == RECIPES


def test_every_run_is_one_graph_forward_and_loses_what_it_learns(finished: tuple[Path, str]) -> None:
    for run in runs_of(finished[0]).values():
        assert run["train_graphs"] == 1
        assert run["validation_graphs"] == 1
        assert run["graph_breaks"] == 0
        assert len(run["losses"]) == 6
        assert run["losses"][-1] < run["losses"][0]
        assert run["tokens_per_second"] > 0
        assert run["saved_activation_bytes"] > 0
        assert run["compile_seconds"] > 0


def test_a_run_of_a_user_is_one_graph_of_inductor_with_the_losses_of_the_other_backend(tmp_path: Path) -> None:
    options = (*SIZE, "--width", 64, "--recipe", "nvfp4", "--out")
    other = train(*options, tmp_path / "other", "--backend", "aot_eager")
    printed_by(train_as_a_user(*options, tmp_path), other)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["settings"]["backend"] == "inductor"
    (run,), other = results["runs"], runs_of(tmp_path / "other")["nvfp4"]
    assert run["train_graphs"] == run["validation_graphs"] == 1 and run["graph_breaks"] == 0
    assert_alike(run["losses"], other["losses"])


def test_a_mixture_of_experts_trains_in_one_graph_to_the_loss_of_its_baseline(
    mixture: tuple[Path, str], tmp_path: Path
) -> None:
    out, printed = mixture
    assert "1 layer with 4 experts of width 128" in printed
    runs = runs_of(out)
    for run in runs.values():
        assert run["train_graphs"] == run["validation_graphs"] == 1
        assert run["graph_breaks"] == 0
        assert run["losses"][-1] < run["losses"][0]
        assert_alike(run["losses"], runs["baseline"]["losses"])
        assert run["losses"] != runs["baseline"]["losses"] or run is runs["baseline"]
    assert_explained(train(*SIZE, "--moe", "1", "--out", tmp_path), "--moe must be 0 or at least 2", "got 1")


def test_differences_are_relative_to_the_baseline(finished: tuple[Path, str]) -> None:
    runs = runs_of(finished[0])
    baseline = runs["baseline"]["validation_loss"]
    assert runs["baseline"]["validation_difference_percent"] == 0
    for run in runs.values():
        assert run["validation_difference_percent"] == pytest.approx(
            100 * (run["validation_loss"] / baseline - 1), abs=1e-12
        )
        # As of losses in training: less than half of what a step changes.
        step = (runs["baseline"]["losses"][0] - runs["baseline"]["losses"][-1]) / 5
        assert abs(run["validation_loss"] - baseline) < step / 2


def test_recipes_change_the_losses_and_save_less_for_backward(finished: tuple[Path, str]) -> None:
    runs = runs_of(finished[0])
    assert len({tuple(run["losses"]) for run in runs.values()}) == len(RECIPES)
    for name in RECIPES[1:]:
        assert runs[name]["saved_activation_bytes"] < runs["baseline"]["saved_activation_bytes"]


def test_a_table_a_plot_and_a_checkpoint_per_recipe_are_written(finished: tuple[Path, str]) -> None:
    out, printed = finished
    for name in RECIPES:
        assert any(line.split()[:1] == [name] for line in printed.splitlines())
        assert (out / f"{name}.pt").exists()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(finished: tuple[Path, str], tmp_path: Path) -> None:
    whole, _ = finished
    arguments = (*EAGER, "--recipe", ",".join(RECIPES[1:]), "--out", tmp_path)
    assert "--resume continues" in train_successfully(*arguments, "--stop-after", 3)
    assert not (tmp_path / "results.json").exists()
    train_successfully(*arguments, "--resume")
    for name, run in runs_of(tmp_path).items():
        assert run["losses"] == runs_of(whole)[name]["losses"], name
        assert run["validation_loss"] == runs_of(whole)[name]["validation_loss"], name
        one, other = (torch.load(out / f"{name}.pt", weights_only=True)["model"] for out in (whole, tmp_path))
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), (name, key)


def test_resuming_a_finished_run_reports_it_again_without_training(finished: tuple[Path, str]) -> None:
    out, _ = finished
    before = runs_of(out)
    train_successfully(*EAGER, "--recipe", ",".join(RECIPES), "--out", out, "--resume")
    assert runs_of(out) == before


def test_resuming_with_other_settings_is_refused(finished: tuple[Path, str]) -> None:
    process = train(*EAGER, "--seed", 7, "--recipe", "nvfp4", "--out", finished[0], "--resume")
    assert_explained(process, "another run", "seed was 0, is 7", "--out")


def test_a_checkpoint_can_be_sampled_from(finished: tuple[Path, str]) -> None:
    sample = ("--sample", "--recipe", "nvfp4", "--prompt", "import ", "--length", 40, "--out", finished[0])
    printed = train_successfully(*sample)
    assert "import " in printed
    assert len(printed) > len("import ") + 10
    assert printed == train_successfully(*sample)


def test_sampling_without_a_checkpoint_says_to_train_first(tmp_path: Path) -> None:
    assert_explained(train("--sample", "--out", tmp_path), "no checkpoint", "train first")


def test_a_damaged_checkpoint_ends_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "nvfp4.pt").write_bytes(b"")
    for arguments in (["--sample", "--recipe", "nvfp4"], [*SIZE, "--recipe", "nvfp4", "--resume"]):
        assert_explained(train(*arguments, "--out", tmp_path), "does not end with a checksum", "delete it and train")


def test_a_diverged_run_ends_with_a_message(tmp_path: Path) -> None:
    process = train(*EAGER, "--lr", 1e30, "--recipe", "baseline", "--out", tmp_path)
    assert_explained(process, "baseline", "became", "lower --lr")


@pytest.mark.parametrize("name", ["quire", "torch", "tqdm", "matplotlib"])
def test_a_missing_dependency_is_named_with_its_remedy(name: str, tmp_path: Path) -> None:
    process = train("--out", tmp_path, missing=name)
    assert_explained(process, f"cannot import {name}", "get it with")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--recipe", "baseline,fp5"), ("--recipe fp5",)),
        (("--steps", 0), ("--steps", "at least 1", "got 0")),
        (("--width", 193), ("--width", "193", "multiple of 64")),
        (("--processes", 2), ("--parallel tp or sp or fsdp or tp+fsdp or ep", "--parallel nothing")),
        (
            ("--processes", 2, "--parallel", "tp", "--width", 64),
            ("gives each process as many heads", "use a multiple of 128"),
        ),
        (("--processes", 2, "--parallel", "tp+fsdp"), ("--processes must be 4, 6, ...", "got 2")),
        (("--processes", 3, "--parallel", "fsdp"), ("--batch must be a multiple of the 3 processes",)),
        (("--processes", 2, "--parallel", "sp", "--width", 128, "--moe", 4), ("--moe does not go with",)),
        (("--processes", 2, "--parallel", "ep", "--moe", 3), ("--moe 3 are no multiple of 2 processes; use --moe 8",)),
    ],
)
def test_a_wrong_option_is_explained_before_anything_is_trained(
    arguments: tuple, words: tuple[str, ...], tmp_path: Path
) -> None:
    assert_explained(train(*arguments, "--out", tmp_path), *words)
    assert not list(tmp_path.iterdir())
