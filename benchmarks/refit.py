"""New weights for a served model: quire.refit, beside converting a model anew and beside a plain copy of the weights.

All take turns, and the best turn of each counts. The model is a stack of linear layers, and the state dict has their
weights in high precision. A plain copy is load_state_dict() of the unconverted model.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import torch

import machine
import quire

PEER = "load_state_dict"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def stack(options: argparse.Namespace) -> torch.nn.Module:
    dtype = DTYPES[options.dtype]
    layers = (torch.nn.Linear(options.width, options.width, False, dtype=dtype) for _ in range(options.layers))
    return torch.nn.Sequential(*layers).requires_grad_(False)


def converted(model: torch.nn.Module, recipe: str) -> torch.nn.Module:
    return quire.convert(model, recipe, for_inference=True, tokens=None)


def best_seconds(recipe: str, options: argparse.Namespace) -> dict[str, float]:
    plain, weights = stack(options), stack(options).state_dict()
    served, best = converted(copy.deepcopy(plain), recipe), {}
    for _ in range(options.rounds):
        fresh = copy.deepcopy(plain)
        calls = {
            PEER: lambda: plain.load_state_dict(weights),
            "refit": lambda: quire.refit(served, weights),
            "refit, check_finite=False": lambda: quire.refit(served, weights, check_finite=False),
            "load_state_dict, convert": lambda fresh=fresh: (fresh.load_state_dict(weights), converted(fresh, recipe)),
        }
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["fp8_current", "mxfp8", "mxfp4", "nvfp4"])
    parser.add_argument("--width", type=int, default=2048, help="inputs and outputs of each layer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path("build/refit.json"), help="where the figures go")
    options = parser.parse_args()
    print(machine.describe())
    print(f"{options.layers} layers of {options.width} x {options.width} in {options.dtype}")
    print(f"{'recipe':<14}{'call':<28}{'ms':>9}{'of the copy':>13}")
    found = []
    for recipe in options.recipes:
        best = best_seconds(recipe, options)
        for name, took in best.items():
            found.append({"recipe": recipe, "call": name, "ms": took * 1e3, "ratio": took / best[PEER]})
            print(f"{recipe:<14}{name:<28}{took * 1e3:>9.2f}{took / best[PEER]:>13.2f}", flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine.describe(), "rows": found}, indent=1))
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
