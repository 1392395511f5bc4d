"""Writes the quantized model as checkpoints of other tools, loads each again, and compares what both models say.

    python examples/chat/dialects.py FOLDER

writes FOLDER/DIALECT for three dialects of quire.io, each with weights in another format. `python -m quire.io inspect`
shows what is in a folder.
"""

import argparse
import copy
import warnings
from pathlib import Path

import torch
from chat import PROMPT
from checkpoint import chat_prompt, load
from llama import Llama, generate
from perplexity import CALIBRATED, windows

import quire

#: Dialect -> a recipe that it stores, together with how inputs are quantized.
RECIPES = {
    "modelopt": "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8",
    "compressed-tensors": "mxfp8",
    "deepseek": "x=fp8_block,w=fp8_block:128x128,dy=mxfp8",
}


def written(model: Llama, dialect: str, folder: Path, batches: list[torch.Tensor]) -> Llama:
    """Writes a folder with the model quantized under the dialect's recipe, and returns the quantized copy. batches:
    tokens [1, T], of which static scales of inputs are measured."""
    made, recipe = copy.deepcopy(model), RECIPES[dialect]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the output layer, which stays as it is
        quire.quantize_model(
            made,
            recipe,
            batches if ":given" in recipe else None,
            filter=lambda module, name: name != "lm_head",
        )
    quire.io.save(made, folder, dialect=dialect)
    return made


def loaded(model: Llama, folder: Path) -> Llama:
    """A model of the same sizes and dtype, with the weights of a folder."""
    with torch.device("meta"):
        made = Llama(model.sizes).to(model.embed_tokens.weight.dtype)
    quire.io.load(made, folder)
    return made.eval()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    folder = parser.parse_args().folder
    checkpoint = load()
    tokenizer, model = checkpoint.tokenizer(), checkpoint.model().bfloat16()
    prompt = tokenizer.encode(chat_prompt(PROMPT)).ids
    batches = list(windows(tokenizer, CALIBRATED, 4, 256).split(1))
    for dialect in RECIPES:
        made = written(model, dialect, folder / dialect, batches)
        again = loaded(model, folder / dialect)
        tokens = torch.tensor([prompt])
        same = "the same" if torch.equal(again(tokens), made(tokens)) else "OTHER"
        size = sum(file.stat().st_size for file in (folder / dialect).iterdir()) / 1e6
        answer = tokenizer.decode(generate(again, again.new_caches(len(prompt) + 32), prompt, 32, checkpoint.end))
        print(f"{dialect}: {size:.0f} MB, loaded with {same} logits, says: {answer.strip()}", flush=True)


if __name__ == "__main__":
    main()
