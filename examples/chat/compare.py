"""How much recipes cost a small language model: perplexity, and the difference to bfloat16 token by token.

    python examples/chat/compare.py mxfp8 nvfp4 "nvfp4 gptq" "mxfp8; qkv_proj|gate_up_proj: nvfp4"

A setting is a recipe, perhaps after a pattern of names and a colon; later parts, after a semicolon, replace earlier
ones for the layers whose names they match. `gptq` or `4over6` at the end is the method, for all its layers. Every model
predicts the same tokens, so the loss of a token under a setting is compared with its loss in bfloat16. The standard
error is that of the mean of these differences, one for each window, since tokens of one window are not independent. The
output layer stays in bfloat16.
"""

import argparse
import copy
import json
import math
import re
import warnings
from pathlib import Path

import torch
from checkpoint import load
from llama import Llama
from perplexity import CALIBRATED, EVALUATED, losses, windows

import quire

METHODS = ("gptq", "4over6")


def parts_of(setting: str) -> tuple[list[tuple[str, str]], str]:
    """The recipe of each pattern of names, and the method."""
    words = setting.rsplit(maxsplit=1)
    text, method = (words[0], words[1]) if len(words) == 2 and words[1] in METHODS else (setting, "rtn")
    parts = []
    for part in text.split(";"):
        # A recipe can have colons too, but no blank after one.
        pattern, found, recipe = part.strip().rpartition(": ")
        parts.append((pattern if found else "", recipe))
    return parts, method


def recipe_of(name: str, parts: list[tuple[str, str]]) -> str | None:
    """The recipe of the layer of that name."""
    return next((recipe for pattern, recipe in reversed(parts) if re.search(pattern, name)), None)


def quantized(model: Llama, setting: str, batches: list[torch.Tensor]) -> Llama:
    """A copy in bfloat16 with the layers of a setting quantized."""
    parts, method = parts_of(setting)
    model = copy.deepcopy(model).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is converted in another call
        for recipe in dict.fromkeys(recipe for _, recipe in parts):
            of_recipe = quire.recipe.as_recipe("compare", recipe)
            # Each call quantizes the layers of one recipe, and reads inputs that the layers quantized before give.
            own = method if method != "4over6" or "nvfp4" in str(of_recipe.weight_spec) else "rtn"
            quire.quantize_model(
                model,
                recipe,
                batches if own == "gptq" else None,
                own,
                filter=lambda module, name, recipe=recipe: name != "lm_head" and recipe_of(name, parts) == recipe,
            )
    return model


def row_of(setting: str, found: torch.Tensor, base: torch.Tensor) -> dict:
    """found, base: the loss of each token, [windows, tokens]."""
    each = (found - base).mean(1)
    mean, error = float(each.mean()), float(each.std() / math.sqrt(len(each)))
    perplexity, more = math.exp(found.mean()), math.exp(mean) - 1
    return {"setting": setting, "perplexity": perplexity, "percent": 100 * more, "error": 100 * (1 + more) * error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--windows", type=int, default=32, help="of 512 tokens to predict")
    parser.add_argument("--calibration", type=int, default=16, help="windows of 256 tokens for gptq")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("build/compare.json"), help="where the figures go")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint = load()
    tokenizer, model = checkpoint.tokenizer(), checkpoint.model()
    tokens = windows(tokenizer, EVALUATED, options.windows, 512)
    batches = list(windows(tokenizer, CALIBRATED, options.calibration, 256)[:, None])
    base = losses(copy.deepcopy(model).bfloat16(), tokens)
    print(f"bfloat16: perplexity {math.exp(base.mean()):.2f} on {options.windows} windows", flush=True)
    rows = []
    for setting in options.settings:
        rows.append(row := row_of(setting, losses(quantized(model, setting, batches), tokens), base))
        print("{setting}: {perplexity:.2f}, {percent:+.1f} ± {error:.1f} %".format(**row), flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
