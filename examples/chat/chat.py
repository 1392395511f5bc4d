"""Answers a prompt with a small language model, quantized and not: the text, and tokens per second.

    ./dev chat "Why is the sky blue?"

Each contender is one compiled graph of one token, which writes its keys and values into a cache of fixed size. All
contenders decode in turns, in one process; of each the best turn counts. The output layer, which shares the embedding
in the original, is untied and quantized with 8 bits under every recipe.
"""

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoint import chat_prompt, load
from llama import Cache, Llama, generate

import quire

PROMPT = "What is the capital of France?"
#: Name -> recipe of the layers, and of the output layer.
RECIPES = {"fp8": ("fp8_current", "fp8_current"), "mxfp8": ("mxfp8", "mxfp8"), "nvfp4": ("nvfp4", "mxfp8")}
PEERS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Contender:
    """A model, its compiled step, and a cache for each answer."""

    name: str
    model: Llama
    step: Callable[[torch.Tensor, torch.Tensor, list[Cache]], torch.Tensor]
    length: int

    def answer(self, prompt: list[int], limit: int, end: int) -> list[int]:
        return generate(self.step, self.model.new_caches(self.length), prompt, limit, end)


def quantized(model: Llama, name: str) -> Llama:
    """A copy with activations in bfloat16, under the recipes of that name."""
    body, head = RECIPES[name]
    model = copy.deepcopy(model).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is converted in the second call
        quire.quantize_model(model, body, filter=lambda module, name: name != "lm_head")
        return quire.quantize_model(model, head, filter=lambda module, name: name == "lm_head")


def contenders(model: Llama, names: list[str], length: int) -> list[Contender]:
    made = []
    for name in names:
        one = copy.deepcopy(model).to(PEERS[name]) if name in PEERS else quantized(model, name)
        # Each a function of its own: graphs of one function are limited in number.
        made.append(Contender(name, one, torch.compile(one, fullgraph=True, dynamic=False), length))
    return made


@torch.no_grad()
def best_seconds(each: list[Contender], prompt: list[int], tokens: int, rounds: int) -> dict[str, float]:
    """Of one token, when `tokens` are decoded after the prompt."""
    best = {one.name: float("inf") for one in each}
    caches = {one.name: one.model.new_caches(one.length) for one in each}
    token = torch.tensor([[prompt[-1]]])
    for _ in range(rounds):
        for one in each:
            positions = [torch.tensor([len(prompt) + i]) for i in range(tokens)]
            begin = time.perf_counter()
            for position in positions:
                one.step(token, position, caches[one.name])[0, -1].argmax()
            best[one.name] = min(best[one.name], (time.perf_counter() - begin) / tokens)
    return best


def show(rows: list[dict]) -> None:
    print(f"\n{'':<10}{'MB':>7}{'tokens/s':>10}{'x float32':>11}{'x bfloat16':>12}{'x better':>10}")
    for row in rows:
        columns = (("x_float32", 11), ("x_bfloat16", 12), ("x_peer", 10))
        times = "".join(f"{row[key]:>{width}.2f}" for key, width in columns)
        print(f"{row['model']:<10}{row['megabytes']:>7.0f}{row['tokens_per_second']:>10.1f}{times}")


def megabytes(model: Llama) -> float:
    """Of the weights that a token reads."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return sum(layer.weight.nbytes for layer in layers) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--limit", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--formats", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender; 0: no times")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("build/chat.json"), help="where the figures go")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        checkpoint = load()
    except ImportError as missing:
        parser.error(f"{missing}; ./dev chat installs what is missing")
    tokenizer = checkpoint.tokenizer()
    prompt = tokenizer.encode(chat_prompt(options.prompt)).ids
    each = contenders(checkpoint.model(), [*PEERS, *options.formats], len(prompt) + options.limit)
    for one in each:
        print(f"{one.name}: {tokenizer.decode(one.answer(prompt, options.limit, checkpoint.end)).strip()}", flush=True)
    if options.rounds:
        best = best_seconds(each, prompt, options.limit - 1, options.rounds)
        peer = min(best[name] for name in PEERS)
        rows = [
            {
                "model": one.name,
                "megabytes": megabytes(one.model),
                "tokens_per_second": 1 / best[one.name],
                **{f"x_{name}": best[name] / best[one.name] for name in PEERS},
                "x_peer": peer / best[one.name],
            }
            for one in each
        ]
        show(rows)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1))
        print(f"{options.threads} threads; written to {options.json}")


if __name__ == "__main__":
    main()
