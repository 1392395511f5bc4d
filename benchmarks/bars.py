"""Draws docs/benchmarks.svg and docs/results.svg from the tables of docs/benchmarks-diary.md and benchmarks-cuda.md:
python benchmarks/bars.py [FOLDER]."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
DIARY = ROOT / "docs/benchmarks-diary.md"
GPU = ROOT / "docs/benchmarks-cuda.md"
#: Heading in the diary -> what the picture calls it.
CPUS = {
    "Figures with AVX2 alone": "AVX2 (capped)",
    "Figures with AVX2 and VNNI": "AVX2-VNNI (capped)",
    "Figures on Zen 4": "AVX-512 (Zen 4)",
    "Figures on Zen 5": "AVX-512 (Zen 5)",
    "Figures with AMX": "AMX",
}
#: Those of them that the README shows: no figure of training with VNNI alone was measured.
SHOWN = [heading for heading in CPUS if heading != "Figures with AVX2 and VNNI"]
RECIPES = {"Float8CurrentScaling": "fp8_current", "MXFP8BlockScaling": "mxfp8", "NVFP4BlockScaling": "nvfp4"}


def figures(heading: str, text: str, passes: str = "inference") -> dict[str, dict[int, float]]:
    """Recipe -> number of tokens -> times as fast as PyTorch. passes: "inference" or "training"."""
    section = text.split(f"### {heading}\n", 1)[1].split("\n### ", 1)[0]
    lines = section.split(f"| M, {passes}", 1)[1].split("\n\n", 1)[0].splitlines()
    header, _, *rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines]
    tokens = [cell for cell in header if cell.isdigit()]
    return {
        name.strip("`"): {int(n): float(cell.strip("*")) for n, cell in zip(tokens, cells, strict=False)}
        for name, *cells in rows
        if name[1:-1] in RECIPES
    }


def steps_on_gpu() -> dict[str, float]:
    """Recipe, as the picture calls it -> the speed of a training step of one layer, divided by that of bfloat16."""
    section = GPU.read_text().split("## A training step of one layer\n", 1)[1].split("\n## ", 1)[0]
    return {name: float(figure) for name, figure in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", section, re.MULTILINE)}


def bars_beside(axes: Axes, groups: dict[str, list[float]], title: str) -> None:
    """groups: what is measured -> the figure of each of RECIPES."""
    for i, label in enumerate(RECIPES.values()):
        heights = [heights[i] for heights in groups.values()]
        bars = axes.bar([x + 0.27 * (i - 1) for x in range(len(groups))], heights, 0.25, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=10)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_title(title)
    axes.set_xticks(range(len(groups)), [name.replace(" ", "\n", 1) for name in groups])
    axes.set_ylabel("times as fast as PyTorch")


def draw_results(path: Path) -> None:
    """The picture of README.md: generating one token, and training."""
    text = DIARY.read_text()
    one = {CPUS[it]: [figures(it, text)[name][1] for name in RECIPES] for it in SHOWN}
    steps = {CPUS[it]: [figures(it, text, "training")[name][2048] for name in RECIPES] for it in SHOWN}
    steps["H100 (GPU)"] = [steps_on_gpu()[label] for label in RECIPES.values()]
    with drawing() as figure:
        left, right = figure.subplots(1, 2, width_ratios=(4, 5))
        bars_beside(left, one, "Inference, one token")
        bars_beside(right, steps, "A training step, 2048 tokens (H100: 8192)")
        for axes in (left, right):
            axes.margins(y=0.1)
        left.legend(loc="upper left")
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})


@contextlib.contextmanager
def drawing() -> Iterator[Figure]:
    """A figure whose file is the same, whatever else has drawn in this process."""
    with matplotlib.rc_context(matplotlib.rcParamsDefault | {"svg.hashsalt": "quire", "font.size": 12}):
        figure = Figure(figsize=(12, 4.2))
        FigureCanvasSVG(figure)
        yield figure


def draw(path: Path) -> None:
    text = DIARY.read_text()
    with drawing() as figure:
        both = figure.subplots(1, 2)
        for axes, tokens, title in zip(both, (1, 2048), ("one token", "2048 tokens"), strict=True):
            groups = {CPUS[it]: [figures(it, text)[name][tokens] for name in RECIPES] for it in CPUS}
            bars_beside(axes, groups, f"Inference, {title}")
        both[0].legend(loc="upper left")
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    draw(folder / "benchmarks.svg")
    draw_results(folder / "results.svg")
