"""Products of a mixture's experts: quire.GroupedLinear against a loop of torch's linear and a loop of quire.Linear.

Inference, weights quantized and prepacked once and cold, activations quantized within every call. The loops know on
the host how many tokens each expert has; GroupedLinear reads it from a tensor. Then, at sizes where arithmetic hardly
counts, what a call costs the host when there are more experts.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

import capped
import machine
import quire
from clock import best_seconds, cold
from contenders import RECIPES

N, K, EXPERTS, TOP_K = 4096, 1024, 8, 2
#: Recipe -> the least ratio to the better of float32 and bfloat16, with and without bfloat16 instructions.
TARGETS = {"nvfp4": (3, 4), "fp8_current": (1.7, 2.5)}


def routed(tokens: int, experts: int) -> list[int]:
    """Rows of each expert, of tokens that choose TOP_K at random."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(TOP_K).indices
    return torch.bincount(ids.flatten(), minlength=experts).tolist()


def grouped(weights: torch.Tensor, recipe: quire.recipe.Recipe) -> quire.GroupedLinear:
    """A layer with weights [experts, n, k], which stay quantized, and prepacked."""
    with torch.no_grad(), quire.quantized_model_init(recipe=recipe):
        layer = quire.GroupedLinear(*weights.shape[:1], *weights.shape[:0:-1], bias=False, params_dtype=weights.dtype)
        for name, weight in zip(layer.weight_names, weights, strict=True):
            getattr(layer, name).copy_(weight)
    quire.prepack_weights(layer)
    return layer


def torch_loop(weights: torch.Tensor, x: torch.Tensor, splits: list[int]) -> Callable[[], object]:
    layers = cold(list(weights.unbind()), weights.nbytes)
    parts = x.to(weights.dtype).split(splits)

    def call() -> object:
        pairs = zip(parts, next(layers), strict=True)
        return torch.cat([torch.nn.functional.linear(part, weight) for part, weight in pairs if len(part)])

    return torch.no_grad()(call)


def codes_bytes(layer: quire.GroupedLinear) -> int:
    weights = layer.weights("").values()
    return sum(b.nbytes for weight in weights for b in weight.buffer_list() if b is not None)


def quire_calls(
    weights: torch.Tensor, x: torch.Tensor, splits: list[int], recipe: quire.recipe.Recipe
) -> dict[str, Callable[[], object]]:
    layer, m_splits = grouped(weights, recipe), torch.tensor(splits)
    size = codes_bytes(layer)
    layers, linears = cold(layer, size), cold(_linears(layer), size)
    parts = x.split(splits)

    def in_groups() -> object:
        with quire.autocast(recipe=recipe):
            return next(layers)(x, m_splits)

    def in_a_loop() -> object:
        with quire.autocast(recipe=recipe):
            return torch.cat([one(part) for one, part in zip(next(linears), parts, strict=True) if len(part)])

    return {"grouped": torch.no_grad()(in_groups), "loop of quire.Linear": torch.no_grad()(in_a_loop)}


def _linears(layer: quire.GroupedLinear) -> torch.nn.ModuleList:
    out = torch.nn.ModuleList()
    for weight in layer.weights("").values():
        one = quire.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        one.weight = weight
        out.append(one)
    return out


def products(tokens: int, seconds: float) -> dict:
    torch.manual_seed(0)
    splits = routed(tokens, EXPERTS)
    weights, x = torch.randn(EXPERTS, N, K).bfloat16(), torch.randn(sum(splits), K).bfloat16()
    calls = {"torch float32": torch_loop(weights.float(), x, splits), "torch bfloat16": torch_loop(weights, x, splits)}
    for name, recipe in RECIPES.items():
        calls |= {f"{name}, {how}": call for how, call in quire_calls(weights, x, splits, recipe).items()}
    best = best_seconds(calls, seconds)
    better = min(best["torch float32"], best["torch bfloat16"])
    print(f"\n{EXPERTS} experts of {N} x {K}, {tokens} tokens, top-{TOP_K}: rows {splits}")
    for name, took in best.items():
        print(f"  {name:<32}{took * 1e6:>10.0f} us   x better {better / took:>6.2f}")
    return {
        "tokens": tokens,
        "splits": splits,
        "us": {name: took * 1e6 for name, took in best.items()},
        "better": better * 1e6,
    }


def host(seconds: float) -> list[dict]:
    """16 tokens through 8 of 8 to 256 experts of 16 x 16, on one thread: one weight for all, whose codes are kept."""
    torch.set_num_threads(1)
    recipe, rows, calls = RECIPES["nvfp4"], [], {}
    for experts in (8, 16, 32, 64, 128, 256):
        layer = quire.GroupedLinear(experts, 16, 16, bias=False, single_grouped_weight=True, recipe=recipe).bfloat16()
        quire.quantize_weights(layer)
        splits = torch.zeros(experts, dtype=torch.int64)
        splits[:: experts // 8] = torch.tensor(routed(16, 8))
        x = torch.randn(int(splits.sum()), 16).bfloat16()
        calls[experts] = torch.no_grad()(lambda layer=layer, x=x, splits=splits: layer(x, splits))
    best = best_seconds(calls, seconds, most=20000)
    print("\nhost: 16 tokens of 16 columns, nvfp4, one weight for all experts")
    for experts, took in best.items():
        print(f"  {experts:>4} experts {took * 1e6:>10.1f} us   x 8 experts {took / best[8]:>6.2f}")
        rows.append({"experts": experts, "us": took * 1e6})
    return rows


def draw(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 4), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        names = [name for name in result["us"] if not name.startswith("torch")]
        ratios = [result["better"] / result["us"][name] for name in names]
        axis.barh(names, ratios, color=["tab:blue" if "grouped" in name else "lightgrey" for name in names])
        axis.axvline(1, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.set(
            title=f"{result['tokens']} tokens, top-{TOP_K} of {EXPERTS}", xlabel="times as fast as torch's better loop"
        )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench moe", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seconds", type=float, default=20, help="for each table [20]")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    capped.add_option(parser)
    options = parser.parse_args()
    capped.apply(options)
    options.out.mkdir(parents=True, exist_ok=True)
    print(machine.describe() + capped.heading())
    results = [products(tokens, options.seconds) for tokens in options.tokens]
    record = {"products": results, "host": host(options.seconds / 4), "targets": TARGETS}
    (options.out / "moe.json").write_text(json.dumps(record, indent=1))
    draw(results, options.out / "moe.png")
    print(f"\nwritten to {options.out}: moe.json, moe.png")


if __name__ == "__main__":
    main()
