"""Time of a Linear under each recipe as a ratio to PyTorch's best, float32 or bfloat16, interleaved in one process.

Machines differ and are shared, so the figure to read is the ratio: best of N rounds, each of which runs every contender
once. Weights are cold: each call takes the next of as many layers as fill 128 MiB.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

import quire

COLD_BYTES = 128 * 2**20
RECIPES = ["fp8_current", "fp8_block", "mxfp8", "nvfp4"]


def cold_layers(make: Callable[[], torch.nn.Module], weight_bytes: int) -> itertools.cycle:
    return itertools.cycle([make() for _ in range(max(2, COLD_BYTES // weight_bytes))])


def contenders(n: int, k: int) -> dict[str, tuple[torch.dtype, itertools.cycle, quire.recipe.Recipe | None]]:
    found = {}
    for name, dtype in (("torch float32", torch.float32), ("torch bfloat16", torch.bfloat16)):
        size = n * k * dtype.itemsize
        found[name] = (dtype, cold_layers(lambda d=dtype: torch.nn.Linear(k, n, dtype=d), size), None)
    for name in RECIPES:
        layers = cold_layers(lambda: quire.Linear(k, n, dtype=torch.bfloat16), n * k * 2)
        found[name] = (torch.bfloat16, layers, quire.recipe.from_name(name))
    return found


def seconds(x: torch.Tensor, layer: torch.nn.Module, recipe: quire.recipe.Recipe | None, backward: bool) -> float:
    with torch.set_grad_enabled(backward), quire.autocast(recipe is not None, recipe=recipe):
        begin = time.perf_counter()
        y = layer(x)
        if backward:
            y.backward(y.detach())
        return time.perf_counter() - begin


def measure(shape: tuple[int, int, int], backward: bool, rounds: int) -> dict[str, float]:
    """Best seconds by contender."""
    m, n, k = shape
    inputs = {d: torch.randn(m, k, dtype=d, requires_grad=backward) for d in (torch.float32, torch.bfloat16)}
    best: dict[str, float] = {}
    entries = contenders(n, k)
    for _ in range(rounds):
        for name, (dtype, layers, recipe) in entries.items():
            took = seconds(inputs[dtype], next(layers), recipe, backward)
            best[name] = min(best.get(name, took), took)
    return best


def row(shape: tuple[int, int, int], backward: bool, best: dict[str, float]) -> list[dict]:
    m, n, k = shape
    peer = min(best["torch float32"], best["torch bfloat16"])
    flops = 2 * m * n * k * (3 if backward else 1)
    return [
        {
            "M": m,
            "N": n,
            "K": k,
            "pass": "forward+backward" if backward else "forward",
            "layer": name,
            "us": took * 1e6,
            "gflops": flops / took / 1e9,
            "ratio": peer / took,
        }
        for name, took in best.items()
    ]


def show(rows: list[dict]) -> None:
    print(f"{'M':>6}{'N':>6}{'K':>6}  {'pass':<17}{'layer':<16}{'us':>10}{'GFLOP/s':>10}{'x peer':>8}")
    for r in rows:
        print(
            f"{r['M']:>6}{r['N']:>6}{r['K']:>6}  {r['pass']:<17}{r['layer']:<16}"
            f"{r['us']:>10.0f}{r['gflops']:>10.1f}{r['ratio']:>8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 128, 2048], help="tokens")
    parser.add_argument("--n", type=int, default=1024, help="out_features")
    parser.add_argument("--k", type=int, default=1024, help="in_features")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where the figures go")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; x peer: above 1 is faster than PyTorch's best"
    )
    rows: list[dict] = []
    for m, backward in itertools.product(options.m, (False, True)):
        shape = (m, options.n, options.k)
        rows += row(shape, backward, measure(shape, backward, options.rounds))
    show(rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=1))
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
