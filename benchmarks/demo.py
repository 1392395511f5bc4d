"""Training steps of the demo's model under each recipe against the same model in bfloat16 and float32, in turns.

What `./dev train` prints as tokens per second comes from one run after another, so other users of the machine meet some
runs and not others. Here every contender takes a step in its turn (forward, backward, clipping, optimizer, on a batch
of its own data), and the best step of each counts. Outside the quantized products the recipes' activations are of the
dtype that is faster without them: float32 on a CPU whose bfloat16 matmuls are slower.
"""

import argparse
import dataclasses
import json
import sys
import warnings
from pathlib import Path

import torch

import capped
import machine
from clock import best_seconds

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/train"))

from data import load_corpus  # noqa: E402
from experiment import make_reproducible  # noqa: E402
from run import Run  # noqa: E402
from settings import BASELINE, RECIPES, Settings  # noqa: E402
from train import DEFAULT  # noqa: E402

PEERS = {"torch float32": "fp32", "torch bfloat16": "bf16"}
#: Recipe -> the least ratio to the better of float32 and bfloat16.
TARGETS = {"fp8_current": 0.9, "fp8_block": 0.9, "mxfp8": 0.9, "nvfp4": 1.0}


def contenders(settings: Settings) -> tuple[dict[str, Run], str]:
    """All of them, compiled, and the dtype of the recipes."""
    corpus = load_corpus()
    runs = {name: Run(BASELINE, dataclasses.replace(settings, dtype=dtype), corpus) for name, dtype in PEERS.items()}
    for run in runs.values():
        run.train_step()  # compiles
    took = best_seconds({name: run.train_step for name, run in runs.items()}, 1)
    dtype = PEERS[min(took, key=took.get)]
    settings = dataclasses.replace(settings, dtype=dtype)
    runs |= {name: Run(name, settings, corpus) for name in RECIPES if name != BASELINE}
    # All exist by now, because under delayed scaling the states of all layers are inputs of a graph.
    for run in runs.values():
        run.train_step()
    return runs, dtype


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench demo", description=__doc__)
    parser.add_argument("--moe", type=int, default=0, help="experts in each block [0: no mixture]")
    parser.add_argument("--seconds", type=float, default=60, help="in all, compiling aside [60]")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    capped.add_option(parser)
    options = parser.parse_args()
    capped.apply(options)
    options.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", module="torch._inductor")
    make_reproducible()
    settings = Settings(**DEFAULT, moe=options.moe, seed=0, dtype="bf16")
    runs, dtype = contenders(settings)
    print(f"{machine.describe()}{capped.heading()}; recipes in {dtype}")
    best = best_seconds({name: run.train_step for name, run in runs.items()}, options.seconds, most=10000)
    better = min(best[name] for name in PEERS)
    rows = []
    for name, took in best.items():
        target = f"   target {TARGETS[name]}" if name in TARGETS and not options.moe else ""
        per_second = settings.tokens_per_step / took
        print(f"  {name:<16}{took * 1e3:>9.1f} ms{per_second:>9.0f} tokens/s   x better {better / took:>5.2f}{target}")
        rows.append({"name": name, "ms": took * 1e3, "tokens_per_second": per_second, "x_better": better / took})
    record = {
        "threads": torch.get_num_threads(),
        "settings": dataclasses.asdict(settings),
        "dtype": dtype,
        "steps": rows,
    }
    (options.out / "demo.json").write_text(json.dumps(record, indent=1))
    print(f"\nwritten to {options.out}: demo.json")


if __name__ == "__main__":
    main()
