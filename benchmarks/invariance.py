"""What quire.batch_invariant costs: the time of a layer within it, divided by that without it, for numbers of tokens.

Both take turns, and the best turn of each counts. A layer with a recipe is converted for inference.
"""

import argparse
import time

import torch

import machine
import quire

RECIPES = {
    "none": None,
    "mxfp8": "mxfp8",
    "nvfp4, rows": quire.recipe.NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
    "x=none,w=nvfp4": "x=none,w=nvfp4,dy=none",
}


def layer(recipe: quire.recipe.Recipe | str | None, width: int) -> torch.nn.Module:
    linear = torch.nn.Linear(width, width, dtype=torch.bfloat16).requires_grad_(False)
    more = {} if recipe is None else {"for_inference": True, "tokens": None}
    return quire.convert(torch.nn.Sequential(linear), recipe, **more)


def ratio(model: torch.nn.Module, x: torch.Tensor, rounds: int) -> float:
    """Of the best times within and without."""
    best = {True: float("inf"), False: float("inf")}
    for _ in range(rounds):
        for enabled in best:
            with quire.batch_invariant(enabled):
                begin = time.perf_counter()
                model(x)
                best[enabled] = min(best[enabled], time.perf_counter() - begin)
    return best[True] / best[False]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16, 128])
    parser.add_argument("--width", type=int, default=2048, help="inputs and outputs of the layer")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{machine.describe()}\n{options.width} x {options.width} in bfloat16, threads: {options.threads}")
    print(f"{'recipe':<16}" + "".join(f"{tokens:>8}" for tokens in options.tokens))
    for name, recipe in RECIPES.items():
        model = layer(recipe, options.width)
        inputs = [torch.randn(tokens, options.width, dtype=torch.bfloat16) for tokens in options.tokens]
        print(f"{name:<16}" + "".join(f"{ratio(model, x, options.rounds):>8.2f}" for x in inputs), flush=True)


if __name__ == "__main__":
    main()
