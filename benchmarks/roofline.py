"""Draws the figures: products under the machine's roof, and time over size."""

from pathlib import Path

import matplotlib

from machine import Peaks

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend comes first)


def draw(rows: list[dict], peaks: Peaks, path: Path) -> None:
    """GFLOP/s over operations per byte, one line a contender, one panel a pass."""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure, axes = pyplot.subplots(1, len(passes), figsize=(7 * len(passes), 5), squeeze=False, layout="constrained")
    for axis, what in zip(axes[0], passes, strict=True):
        those = [row for row in rows if row["pass"] == what]
        least, most = (f(row["intensity"] for row in those) for f in (min, max))
        for name, style in (("float32", ":"), ("bfloat16", "--"), ("int8", "-")):
            peak = getattr(peaks, name)
            if not peak:
                continue
            ridge = peak / peaks.read
            xs = [least / 2, *([ridge] if least / 2 < ridge < most * 2 else []), most * 2]
            ys = [min(peak, x * peaks.read) / 1e9 for x in xs]
            axis.plot(xs, ys, color="black", linestyle=style, linewidth=1, label=f"roof, {name}")
        for layer in dict.fromkeys(row["layer"] for row in those):
            points = [(row["intensity"], row["gflops"]) for row in those if row["layer"] == layer]
            marker = "o" if layer.startswith("quire") else "x"
            axis.plot(*zip(*points, strict=True), marker=marker, linewidth=0.8, label=layer)
        axis.set(xscale="log", yscale="log", title=f"{what}: M = {', '.join(str(m) for m in _sizes(those))}")
        axis.set(xlabel="operations per byte that has to move", ylabel="GFLOP/s")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _sizes(rows: list[dict]) -> list[int]:
    return list(dict.fromkeys(row["M"] for row in rows))


def draw_sweep(rows: list[dict], path: Path) -> None:
    """Microseconds over the size that varies, one panel a dimension; cliffs are red."""
    dimensions = list(dict.fromkeys(row["varies"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(dimensions), figsize=(6 * len(dimensions), 5), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, varies in zip(axes[0], dimensions, strict=True):
        those = [row for row in rows if row["varies"] == varies]
        for layer in dict.fromkeys(row["layer"] for row in those):
            line = [row for row in those if row["layer"] == layer]
            axis.plot([r["size"] for r in line], [r["us"] for r in line], marker=".", linewidth=0.8, label=layer)
        cliffs = [row for row in those if row["cliff"]]
        axis.scatter([r["size"] for r in cliffs], [r["us"] for r in cliffs], color="red", zorder=3)
        axis.set(xscale="log", yscale="log", xlabel=varies, title=those[0]["fixed"])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("us")
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
