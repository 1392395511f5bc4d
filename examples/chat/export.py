"""Exports the quantized model for the C++ program of examples/serve_cpp, which compares its logits with Python's.

    python examples/chat/export.py FOLDER

writes FOLDER/FORMAT.pt2, which takes tokens int64 [1, T] of any T from 2 on and gives logits [1, T, vocabulary], and
FOLDER/FORMAT.cases.pt, tokens and logits of two prompts.
"""

import argparse
from pathlib import Path

import torch
from chat import PROMPT, RECIPES, quantized
from checkpoint import chat_prompt, load
from llama import Llama


@torch.no_grad()
def export(model: Llama, name: str, folder: Path, prompts: list[list[int]]) -> None:
    tokens = torch.tensor([prompts[0]])
    length = torch.export.Dim("length", min=2, max=model.sizes.max_position_embeddings)
    program = torch.export.export(model, (tokens,), dynamic_shapes={"tokens": {1: length}})
    package = str(folder / f"{name}.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    served, cases = torch._inductor.aoti_load_package(package), []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        cases += [tokens, served(tokens)]
    torch.save(cases, folder / f"{name}.cases.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--formats", nargs="+", choices=RECIPES, default=["nvfp4"])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = load()
    tokenizer, model = checkpoint.tokenizer(), checkpoint.model()
    prompts = [tokenizer.encode(text).ids for text in (chat_prompt(PROMPT), "The sky is")]
    for name in options.formats:
        export(quantized(model, name), name, options.folder, prompts)
        print(f"exported {options.folder / name}.pt2")


if __name__ == "__main__":
    main()
