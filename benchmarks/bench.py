"""Linear layers under each recipe against PyTorch's and other libraries', timed in turns in one process.

Machines differ and are shared, so the figures to read are the ratios: best of several rounds, in each of which every
contender runs once. Weights are cold: each call takes the next of as many as fill 128 MiB. Quantizing activations, and
in training weights and gradients, is part of every call. `--sweep` looks for cliffs instead (sweep.py).
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch

import capped
import machine
import quantizers
import roofline
import sweep
from clock import best_seconds
from contenders import Contender, make, peers_that_lack

PASSES = {"inference": 1, "training": 3}  # -> how many products
HEADER = (
    f"{'M':>5} {'pass':<10}{'layer':<17}{'us':>10}{'GFLOP/s':>9}{'GB/s':>7}{'of roof':>8}"
    f"{'x fp32':>8}{'x bf16':>8}{'x better':>9}  kernels"
)


def moved_bytes(contender: Contender, m: int, shape: tuple[int, int], backward: bool) -> int:
    """The least that a call reads and writes: the weight, x and y; backward also dy, dx, and the weight's gradient."""
    n, k = shape
    item = contender.dtype.itemsize
    if backward:
        return 2 * n * k * item + 2 * m * (n + k) * item
    return contender.weight_bytes + m * (n + k) * item


def measure(
    contenders: list[Contender], x: torch.Tensor, what: str, peaks: machine.Peaks, options: argparse.Namespace
) -> list[dict]:
    """A row for every contender that can do this pass."""
    m, backward = len(x), what == "training"
    calls = {c.name: call for c in contenders if (call := getattr(c, what)(x)) is not None}
    best = best_seconds(calls, options.seconds)
    rows = []
    for c in contenders:
        if c.name not in best:
            continue
        took, flops = best[c.name], 2 * m * options.n * options.k * PASSES[what]
        size = moved_bytes(c, m, (options.n, options.k), backward)
        ratios = {f"x_{kind}": best[f"torch {kind}"] / took for kind in ("float32", "bfloat16")}
        of_roof = peaks.least_seconds(flops, size, c.arithmetic) / took
        rows.append(
            {"M": m, "N": options.n, "K": options.k, "pass": what, "layer": c.name, "us": took * 1e6}
            | {"gflops": flops / took / 1e9, "gbytes": size / took / 1e9, "intensity": flops / size}
            | {"of_roof": of_roof, **ratios, "x_better": min(ratios.values()), "kernels": c.kernels(x, backward)}
        )
    return rows


def show(rows: list[dict]) -> None:
    for r in rows:
        print(
            f"{r['M']:>5} {r['pass']:<10}{r['layer']:<17}{r['us']:>10.0f}{r['gflops']:>9.1f}{r['gbytes']:>7.1f}"
            f"{r['of_roof']:>8.2f}{r['x_float32']:>8.2f}{r['x_bfloat16']:>8.2f}{r['x_better']:>9.2f}  {r['kernels']}",
            flush=True,
        )


def layers(options: argparse.Namespace, peaks: machine.Peaks) -> tuple[list[dict], machine.Peaks]:
    """The rows, and the best peaks seen: they are measured again before each M, as a machine has slow minutes."""
    torch.manual_seed(0)
    weight = torch.randn(options.n, options.k) * options.k**-0.5
    contenders = make(weight, options.weights)
    sizes = f"N = {options.n}, K = {options.k}; inference: weights {options.weights}"
    print(f"\nlayers{capped.heading()}, {sizes}\n{HEADER}")
    rows: list[dict] = []
    for what, m in itertools.product(options.passes, options.m):
        peaks = peaks.best(machine.by_torch(options.peak_seconds / 4))
        found = measure(contenders, torch.randn(m, options.k), what, peaks, options)
        show(found)
        rows += found
        # Not PyTorch's two, which the others stand beside.
        slow = [r["layer"] for r in found[2:] if r["us"] > options.seconds * 1e6]
        for name in slow:
            print(f"without {name} from here on: one call of {m} tokens took more than {options.seconds:g} s")
        contenders = [c for c in contenders if c.name not in slow]
    return rows, peaks


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    capped.add_option(parser)
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 128, 2048], help="tokens")
    parser.add_argument("--n", type=int, default=4096, help="out_features")
    parser.add_argument("--k", type=int, default=4096, help="in_features")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument(
        "--weights",
        choices=["quantized", "kept"],
        default="quantized",
        help="inference: quantized parameters, or codes that quire.quantize_weights keeps beside the weights",
    )
    parser.add_argument("--seconds", type=float, default=12, help="for all contenders of one M and pass together")
    parser.add_argument("--peak-seconds", type=float, default=8, help="for what the machine can do")
    parser.add_argument("--threads", type=int, default=min(2, torch.get_num_threads()))
    parser.add_argument("--no-quantizers", action="store_true", help="layers alone")
    parser.add_argument("--sweep", action="store_true", help="instead: sizes from 1 to 8192, and whether time jumps")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of the figures and the pictures")
    return parser.parse_args()


def main() -> int:
    options = parse()
    capped.apply(options)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    print(machine.describe() + capped.heading())
    if options.sweep:
        return 0 if sweep.run(options.out, backward=options.passes == ["training"]) else 1
    for peer, why in peers_that_lack(options.n, options.k).items():
        print(f"without {peer}: {why}")
    peaks = machine.measure(options.peak_seconds)
    print(f"this machine: {peaks}")
    if not peaks.int8:
        print("its int8 peak is not measured, so that 4 bits may stand above the roof; without --isa the loops of ")
        print("./dev bench core, once built, measure it")
    rows, peaks = layers(options, peaks)
    figures = {"machine": machine.describe(), "capped": capped.isa_of(), "peaks": vars(peaks), "layers": rows}
    if not options.no_quantizers:
        figures["quantizers"] = quantizers.run(options.seconds)
    (options.out / "bench.json").write_text(json.dumps(figures, indent=1))
    roofline.draw(rows, peaks, options.out / "roofline.png")
    print(f"\nwritten to {options.out}: bench.json, roofline.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
