"""Draws docs/benchmarks.svg from the tables of docs/benchmarks-diary.md: python benchmarks/bars.py [FILE]."""

import re
import sys
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
DIARY = ROOT / "docs/benchmarks-diary.md"
#: Heading in the diary -> what the picture calls it.
CPUS = {
    "Figures with AVX2 alone": "AVX2 (capped)",
    "Figures with AVX2 and VNNI": "AVX2-VNNI (capped)",
    "Figures on Zen 4": "AVX-512 (Zen 4)",
    "Figures on Zen 5": "AVX-512 (Zen 5)",
    "Figures with AMX": "AMX",
}
RECIPES = {"Float8CurrentScaling": "fp8_current", "MXFP8BlockScaling": "mxfp8", "NVFP4BlockScaling": "nvfp4"}


def figures(heading: str, text: str) -> dict[str, list[float]]:
    """Recipe -> times as fast as PyTorch with one token, with 16, ... and with the most."""
    table = text.split(f"### {heading}\n", 1)[1].split("| M, inference, prepacked |", 1)[1].split("\n\n", 1)[0]
    rows = (re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines())
    return {
        name.strip("`"): [float(cell.strip("*")) for cell in cells] for name, *cells in rows if name[1:-1] in RECIPES
    }


def draw(path: Path) -> None:
    text = DIARY.read_text()
    # Whatever else has drawn in this process, the file is the same.
    with matplotlib.rc_context(matplotlib.rcParamsDefault | {"svg.hashsalt": "quire", "font.size": 12}):
        figure = Figure(figsize=(12, 4.2))
        FigureCanvasSVG(figure)
        both = figure.subplots(1, 2)
        for axes, column, title in zip(both, (0, -1), ("one token", "2048 tokens"), strict=True):
            for i, (name, label) in enumerate(RECIPES.items()):
                heights = [figures(heading, text)[name][column] for heading in CPUS]
                bars = axes.bar([x + 0.27 * (i - 1) for x in range(len(CPUS))], heights, 0.25, label=label)
                axes.bar_label(bars, fmt="%.1f", fontsize=10)
            axes.axhline(1, color="black", linewidth=1)
            axes.set_title(f"Inference, {title}")
            axes.set_xticks(range(len(CPUS)), [name.replace(" ", "\n", 1) for name in CPUS.values()])
            axes.set_ylabel("times as fast as PyTorch")
        both[0].legend(loc="upper left")
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/benchmarks.svg")
