"""What a call of quire.Linear costs the host, as a ratio to torch.nn.Linear's, in one process and one thread.

The shapes are so small that arithmetic hardly counts: what is measured is Python, dispatch, checks and allocation.
Contenders take turns in bursts that are shorter than a time slice, and of each the best burst counts, so that a shared
machine disturbs little. Compile times are of a model of twelve layers, forward and backward, without any cache.
"""

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import machine
import quire

PEER = "torch.nn.Linear"
#: Pass -> the largest ratio that is accepted.
TARGETS = {"forward": 1.5, "forward+backward": 2.0, "compiled forward": 1.5, "cold compile": 1.3}
RECIPE = quire.recipe.Float8CurrentScaling()


def layers(n: int, k: int) -> dict[str, tuple[torch.nn.Module, quire.recipe.Recipe | None]]:
    """Name -> a layer and the recipe it runs under."""
    kept = quire.Linear(k, n)
    quire.quantize_weights(kept, RECIPE)
    with quire.quantized_model_init(recipe=RECIPE):
        quantized = quire.Linear(k, n)
    return {
        PEER: (torch.nn.Linear(k, n), None),
        "quire, no recipe": (quire.Linear(k, n), None),
        "quire, fp8_current, kept codes": (kept, RECIPE),
        "quire, fp8_current, quantized weight": (quantized, RECIPE),
    }


def best_seconds(calls: dict[str, tuple[Callable[[], object], quire.recipe.Recipe | None]], rounds: int) -> dict:
    """Name -> seconds of one call, the best of `rounds` bursts in turns."""
    burst, best = 20, dict.fromkeys(calls, float("inf"))
    for _, (name, (call, recipe)) in itertools.product(range(rounds), calls.items()):
        # An autocast encloses a step, not a layer: entering it is not part of the call.
        with quire.autocast(recipe is not None, recipe=recipe):
            begin = time.perf_counter()
            for _ in range(burst):
                call()
            best[name] = min(best[name], (time.perf_counter() - begin) / burst)
    return best


def eager(shape: tuple[int, int, int], backward: bool, rounds: int) -> dict[str, float]:
    m, n, k = shape
    x, dy = torch.randn(m, k, requires_grad=backward), torch.randn(m, n)

    def call(layer: torch.nn.Module) -> Callable[[], object]:
        if backward:
            return lambda: torch.autograd.backward(layer(x), dy)
        return lambda: layer(x)

    with torch.set_grad_enabled(backward):
        return best_seconds({name: (call(layer), recipe) for name, (layer, recipe) in layers(n, k).items()}, rounds)


def compiled(shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    m, n, k = shape
    x, calls = torch.randn(m, k), {}
    with torch.no_grad():
        for name, (layer, recipe) in layers(n, k).items():
            torch._dynamo.reset()  # a graph per contender, not one that guards on whose turn it is
            function = torch.compile(layer, fullgraph=True)
            with quire.autocast(recipe is not None, recipe=recipe):
                function(x)
            calls[name] = (lambda function=function: function(x), recipe)
        return best_seconds(calls, rounds)


def cold_compile(rounds: int) -> dict[str, float]:
    """Seconds of the first training step of a compiled model less those of its second."""
    best: dict[str, float] = {}
    for _, name in itertools.product(range(rounds), layers(1, 1)):
        model = torch.nn.Sequential()
        for _ in range(12):
            layer, recipe = layers(64, 64)[name]
            model.extend([layer, torch.nn.GELU()])
        torch._dynamo.reset()
        function, x = torch.compile(model, fullgraph=True), torch.randn(16, 64)
        took = []
        for _ in range(2):
            with quire.autocast(recipe is not None, recipe=recipe):
                begin = time.perf_counter()
                function(x).sum().backward()
                took.append(time.perf_counter() - begin)
        best[name] = min(best.get(name, float("inf")), took[0] - took[1])
    return best


def rows(what: str, shape: tuple[int, int, int] | None, best: dict[str, float]) -> list[dict]:
    text = "" if shape is None else "x".join(map(str, shape))
    return [
        {"pass": what, "MxNxK": text, "layer": name, "us": took * 1e6, "ratio": took / best[PEER]}
        for name, took in best.items()
    ]


def show(found: list[dict]) -> None:
    print(f"{'pass':<18}{'MxNxK':<12}{'layer':<38}{'us':>12}{'ratio':>8}{'target':>8}")
    for r in found:
        target = f"{TARGETS[r['pass']]:.1f}" if r["layer"] != PEER else ""
        over = "  over" if target and r["ratio"] > TARGETS[r["pass"]] else ""
        line = f"{r['pass']:<18}{r['MxNxK']:<12}{r['layer']:<38}{r['us']:>12.2f}{r['ratio']:>8.2f}{target:>8}{over}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1x16x16", "16x64x64"], help="MxNxK: tokens x out x in")
    parser.add_argument("--rounds", type=int, default=400, help="bursts of 20 calls each")
    parser.add_argument("--compiles", type=int, default=2, help="cold compiles of each model; 0: none")
    parser.add_argument("--json", type=Path, default=Path("build/host.json"), help="where the figures go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    warnings.filterwarnings("ignore", message="dynamo_pgo")  # it is disabled, as asked for
    print(machine.describe())
    found: list[dict] = []
    for shape in [tuple(map(int, text.split("x"))) for text in options.shapes]:
        found += rows("forward", shape, eager(shape, False, options.rounds))
        found += rows("forward+backward", shape, eager(shape, True, options.rounds))
        found += rows("compiled forward", shape, compiled(shape, options.rounds))
    if options.compiles:
        cold_compile(1)  # what torch does once per process
        found += rows("cold compile", None, cold_compile(options.compiles))
    show(found)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine.describe(), "rows": found}, indent=1))
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
