"""Exports the quantized model for the C++ program `generate` of examples/serve_cpp, which then answers without Python.

    python examples/chat/export.py FOLDER

writes, for each format, FOLDER/FORMAT.pt2, one step of decoding: a token int64 [1, 1] and its position int64 [1] give
logits [1, 1, vocabulary]. Keys and values of the tokens before it are in caches of fixed size, which the exported
program holds. FOLDER/FORMAT.greedy.pt has a prompt, and the tokens with which Python continues it by the same step.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from chat import PROMPT, RECIPES, quantized
from checkpoint import chat_prompt, load
from llama import Llama, generate


class Step(torch.nn.Module):
    """A model with caches for `length` tokens in buffers."""

    def __init__(self, model: Llama, length: int):
        super().__init__()
        self.model = model
        for i, cache in enumerate(model.new_caches(length)):
            for kind, kept in zip(("keys", "values"), cache, strict=True):
                self.register_buffer(f"{kind}_{i}", kept)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        caches = [[getattr(self, f"{kind}_{i}") for kind in ("keys", "values")] for i in range(len(self.model.layers))]
        return self.model(token, position, caches)


@torch.no_grad()
def export(model: Llama, length: int, package: Path) -> Callable[..., torch.Tensor]:
    """Writes the step of a model with caches for `length` tokens. Loads the written step, and returns it as a function
    for generate(): (tokens, positions, caches) -> logits. It ignores `caches`, because the step has its own."""
    program = torch.export.export(Step(model, length), (torch.tensor([[0]]), torch.tensor([0])))
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    served = torch._inductor.aoti_load_package(str(package))
    return lambda token, position, caches: served(token, position)


def record(prompt: list[int], answer: list[int], end: int, texts: list[bytes]) -> list[torch.Tensor]:
    """What generate.cpp reads: the prompt, the answer, the token that ends answers, the bytes of all tokens' texts, one
    after another, and offsets: the text of token i is bytes[offsets[i] : offsets[i + 1]]."""
    offsets = torch.tensor([0, *map(len, texts)]).cumsum(0)
    return [
        torch.tensor(prompt),
        torch.tensor(answer),
        torch.tensor(end),
        torch.tensor(list(b"".join(texts)), dtype=torch.uint8),
        offsets,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--formats", nargs="+", choices=RECIPES, default=["nvfp4"])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--limit", type=int, default=48, help="tokens of an answer")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = load()
    tokenizer, model = checkpoint.tokenizer(), checkpoint.model()
    prompt = tokenizer.encode(chat_prompt(options.prompt)).ids
    for name in options.formats:
        step = export(quantized(model, name), len(prompt) + options.limit, options.folder / f"{name}.pt2")
        answer = generate(step, [], prompt, options.limit, checkpoint.end)
        torch.save(record(prompt, answer, checkpoint.end, checkpoint.texts()), options.folder / f"{name}.greedy.pt")
        print(f"exported {options.folder / name}.pt2, which says: {tokenizer.decode(answer).strip()}")


if __name__ == "__main__":
    main()
