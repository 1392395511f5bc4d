"""The outcome: a table on the terminal, results.json for programs, loss.png for eyes."""

import dataclasses
import json
from pathlib import Path

import matplotlib
import torch
from data import Corpus
from settings import BASELINE, Settings

matplotlib.use("Agg")  # draws into files; needs no screen
from matplotlib import pyplot

SMOOTHING = 0.04  # of the steps; a moving mean of this width is what the curves show


def add_differences(results: list[dict]) -> list[dict]:
    """Each result with its validation loss relative to the baseline's, in percent; None where there is no baseline."""
    baseline = next((r["validation_loss"] for r in results if r["recipe"] == BASELINE), None)
    differences = [None if baseline is None else 100 * (r["validation_loss"] / baseline - 1) for r in results]
    return [{**r, "validation_difference_percent": d} for r, d in zip(results, differences, strict=True)]


def table(results: list[dict], dtype: str) -> str:
    """One line per recipe, columns aligned, ready to print."""
    header = (
        "recipe", "train loss", "val loss", "val diff", "tokens/s", "saved for backward", "sent a step", "graphs",
        "breaks", "compile",
    )  # fmt: skip
    lines = [header]
    for r in results:
        difference = r["validation_difference_percent"]
        lines.append(
            (
                f"{r['recipe']} ({dtype})" if r["recipe"] == BASELINE else r["recipe"],
                f"{r['train_loss']:.4f}",
                f"{r['validation_loss']:.4f}",
                "-" if difference is None else f"{difference:+.2f} %",
                f"{r['tokens_per_second']:,.0f}",
                f"{r['saved_activation_bytes'] / 1e6:.1f} MB",
                f"{r['wire_bytes'] / 1e6:.1f} MB",
                f"{r['train_graphs']} + {r['validation_graphs']}",
                f"{r['graph_breaks']}",
                f"{r['compile_seconds']:.1f} s",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rows.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(rows)


def smooth(losses: list[float], width: int) -> tuple[list[int], torch.Tensor]:
    """Moving means over `width` steps, and the steps (counted from 1) at the end of each."""
    width = min(width, len(losses))
    means = torch.tensor(losses, dtype=torch.float64).unfold(0, width, 1).mean(1)
    return list(range(width, len(losses) + 1)), means


def plot(results: list[dict], path: Path) -> None:
    """All loss curves on one axis, and under it their distance from the baseline, which the eye could not see above."""
    figure, (curves, distances) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 7), height_ratios=(3, 1), layout="constrained"
    )
    width = max(1, round(SMOOTHING * max(len(r["losses"]) for r in results)))
    baseline = next((smooth(r["losses"], width)[1] for r in results if r["recipe"] == BASELINE), None)
    for r in results:
        steps, means = smooth(r["losses"], width)
        (line,) = curves.plot(steps, means, label=f"{r['recipe']}: {r['validation_loss']:.4f}")
        if baseline is not None and r["recipe"] != BASELINE:
            distances.plot(steps, 100 * (means / baseline - 1), color=line.get_color())
    curves.set(ylabel=f"training loss, nats per byte\n(mean of {width} steps)", title="Training in low precision")
    curves.legend(title="validation loss")
    distances.axhline(0, color="grey", linewidth=0.8)
    distances.set(xlabel="step", ylabel="from baseline, %")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(results: list[dict], settings: Settings, corpus: Corpus, out: Path) -> None:
    """Print the table; write results.json and loss.png to the folder `out`."""
    results = add_differences(results)
    print("\n" + table(results, settings.dtype))
    content = {
        "settings": dataclasses.asdict(settings),
        "data": {
            "sha256": corpus.digest,
            "train_bytes": corpus.train.numel(),
            "train_files": corpus.train_files,
            "validation_bytes": corpus.validation.numel(),
            "validation_files": corpus.validation_files,
        },
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "runs": results,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    plot(results, out / "loss.png")
    print(f"\nwrote {out / 'results.json'}, {out / 'loss.png'} and a checkpoint per recipe")
