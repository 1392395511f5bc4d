"""Whether time grows with work: layers of sizes from 1 to 8192, powers of two and odd ones between.

One dimension varies at a time. A size is a cliff where a call takes more than 1.6 times as long as one of the next
larger size. A machine that others use shows cliffs that are not there, so suspects are timed again, against their
neighbour alone, up to three times.
"""

import itertools
import json
from pathlib import Path

import torch

import contenders
import roofline
from clock import best_seconds

LIMIT = 1.6
#: Dimension -> what the other two are.
FIXED = {"M": {"N": 1024, "K": 1024}, "N": {"M": 64, "K": 1024}, "K": {"M": 64, "N": 1024}}
SIZES = sorted({1 << i for i in range(14)} | {(1 << i) + d for i in range(2, 13) for d in (-1, 1, (1 << i) // 2 + 1)})


def call(layer: str, shape: dict[str, int], backward: bool):
    """One pass of a layer; warm weights, since neighbours differ by little in bytes."""
    x, weight = torch.randn(shape["M"], shape["K"]), torch.randn(shape["N"], shape["K"])
    x, weight = x.bfloat16(), weight.bfloat16()
    recipe = contenders.RECIPES.get(layer)
    if backward:
        return contenders.training_call(itertools.repeat(contenders.layer_of(weight, recipe)), x)
    made = contenders.layer_of(contenders.quantized(weight, recipe) if recipe else weight, recipe)
    return torch.no_grad()(lambda: made(x))


def sweep(layer: str, varies: str, backward: bool) -> list[dict]:
    calls = {size: call(layer, FIXED[varies] | {varies: size}, backward) for size in SIZES}
    best = best_seconds(calls, 8, least=4, most=60)
    for (size, larger), _ in itertools.product(itertools.pairwise(SIZES), range(3)):
        if best[size] > LIMIT * best[larger]:
            again = best_seconds({size: calls[size], larger: calls[larger]}, 1, least=5, most=400)
            best |= {s: min(best[s], again[s]) for s in again}
    fixed = ", ".join(f"{name} = {value}" for name, value in FIXED[varies].items())
    rows = []
    for size, larger in itertools.zip_longest(SIZES, SIZES[1:]):
        ratio = best[size] / best[larger] if larger else 0
        rows.append({"layer": layer, "varies": varies, "size": size, "fixed": fixed, "us": best[size] * 1e6})
        rows[-1] |= {"pass": "training" if backward else "inference", "next": larger, "ratio": ratio}
        rows[-1]["cliff"] = ratio > LIMIT
    return rows


def run(out: Path, backward: bool) -> bool:
    """Prints cliffs, writes sweep.json and sweep.png. Whether there are none among quire's."""
    rows: list[dict] = []
    for layer, varies in itertools.product(["torch bfloat16", *contenders.RECIPES], FIXED):
        found = sweep(layer, varies, backward)
        rows += found
        worst = max(found, key=lambda row: row["ratio"])
        print(
            f"{layer:<16}{varies} of {len(SIZES)} sizes, {worst['fixed']}: the worst is {varies} = {worst['size']}, "
            f"{worst['ratio']:.2f} times {worst['next']}'s",
            flush=True,
        )
        for row in found:
            if row["cliff"]:
                print(f"  cliff: {varies} = {row['size']} takes {row['ratio']:.2f} times as long as {row['next']}")
    (out / "sweep.json").write_text(json.dumps(rows, indent=1))
    roofline.draw_sweep(rows, out / "sweep.png")
    cliffs = [row for row in rows if row["cliff"] and row["layer"] in contenders.RECIPES]
    print(f"{len(cliffs)} cliffs of quire's; written to {out}: sweep.json, sweep.png")
    return not cliffs
