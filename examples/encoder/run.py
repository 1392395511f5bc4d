"""Converts a sentence encoder with quire.convert: how much its embeddings change, and how fast it is.

All models encode the same sentences in one process, in turns. The time of a model is that of its fastest round. Models
with a recipe keep quantized weights (quire.quantize_weights), and quantize activations in every call.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import torch
from encoder import Encoder, batches, embed, load

import quire

RECIPES = {
    "fp8_current": quire.recipe.Float8CurrentScaling(),
    "mxfp8": quire.recipe.MXFP8BlockScaling(),
    # One scale for 16 x 16 weights is for training, where their transpose needs the same codes.
    "nvfp4": quire.recipe.NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4, 16x16": quire.recipe.NVFP4BlockScaling(),
}
SENTENCES = Path(__file__).with_name("sentences.txt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def contenders(model: Encoder, dtype: torch.dtype) -> dict[str, Encoder]:
    """The model in both of PyTorch's dtypes, and converted under each recipe with activations in `dtype`."""
    found = {"torch float32": model, "torch bfloat16": copy.deepcopy(model).bfloat16()}
    for name, recipe in RECIPES.items():
        found[name] = quire.convert(copy.deepcopy(model).to(dtype), recipe)
        quire.quantize_weights(found[name])
    return found


def best_seconds(models: dict[str, Encoder], inputs: list, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(models, float("inf"))
    for _ in range(rounds):
        for name, model in models.items():
            begin = time.perf_counter()
            embed(model, inputs)
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def compare(models: dict[str, Encoder], inputs: list, rounds: int) -> list[dict]:
    exact, best = embed(models["torch float32"], inputs), best_seconds(models, inputs, rounds)
    peer = min(best["torch float32"], best["torch bfloat16"])
    rows = []
    for name, model in models.items():
        cosine = (embed(model, inputs).double() * exact.double()).sum(-1)
        rows.append(
            {
                "model": name,
                "cosine_mean": cosine.mean().item(),
                "cosine_min": cosine.min().item(),
                "sentences_per_second": len(exact) / best[name],
                **{f"x_{dtype}": best[f"torch {dtype}"] / best[name] for dtype in DTYPES},
                "x_peer": peer / best[name],
            }
        )
    return rows


def show(rows: list[dict]) -> None:
    print(f"{'':<16}{'cosine to float32':^20}{'':>14}{'times as fast as':>26}")
    print(f"{'':<16}{'mean':>10}{'least':>10}{'sentences/s':>14}{'float32':>9}{'bfloat16':>9}{'better':>8}")
    for r in rows:
        print(
            f"{r['model']:<16}{r['cosine_mean']:>10.5f}{r['cosine_min']:>10.5f}{r['sentences_per_second']:>14.0f}"
            f"{r['x_float32']:>9.2f}{r['x_bfloat16']:>9.2f}{r['x_peer']:>8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=Path, default=SENTENCES, help="a text file, one in each line")
    parser.add_argument("--batch", type=int, default=25, help="sentences a batch")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of activations of quantized models")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("build/encoder.json"), help="where the figures go")
    options = parser.parse_args()
    try:
        model = load()
    except ImportError as missing:
        parser.error(f"{missing}; ./dev bench encoder installs what is missing")
    inputs = batches(options.sentences.read_text().splitlines(), options.batch)
    models = contenders(model, DTYPES[options.dtype])
    print(f"{quire.conversion_report(models['nvfp4'])}\n")
    rows = compare(models, inputs, options.rounds)
    print(f"{torch.get_num_threads()} threads, {sum(len(tokens) for tokens, _ in inputs)} sentences")
    show(rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=1))
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
