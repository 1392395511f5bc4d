"""python -m quire.io run --prompt: text of a language model in a checkpoint folder, by Hugging Face transformers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checks import check_type
from quire.integrations import needed
from quire.integrations.transformers import KNOWN, METHODS, REPLACEABLE, register
from quire.io.container import CheckpointError
from quire.io.inspection import inspect
from quire.nn.own_context import running

_CALLER = "python -m quire.io run --prompt"


@dataclass(frozen=True)
class Answer:
    """What generate() found. text: what follows the prompt. tokens: how many it has. seconds: for all of them, the
    prompt included."""

    path: str
    prompt: str
    text: str
    tokens: int
    seconds: float

    def __str__(self) -> str:
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"{self.prompt}{self.text}\n\n{self.tokens} tokens in {self.seconds:.2f} s: {rate:.1f} tokens/s"

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dict(vars(self))


def generate(path: str | Path, prompt: str, new_tokens: int = 32) -> Answer:
    """Continues a prompt by the most probable tokens, with a static cache.

    path: a folder with a quantized checkpoint that transformers loads through quire (register()), its config.json and
    its tokenizer. new_tokens: the most that are made; fewer if the model ends its text.

    Raises ImportError without transformers; CheckpointError for another dialect, or without a tokenizer; ValueError for
    an empty prompt, or new_tokens below 1.
    """
    check_type(_CALLER, str | Path, path=path)
    check_type(_CALLER, str, prompt=prompt)
    check_type(_CALLER, int, new_tokens=new_tokens)
    if new_tokens < 1:
        raise ValueError(f"{_CALLER}: new_tokens must be at least 1, got {new_tokens}")
    transformers = needed(_CALLER, "transformers", KNOWN)
    dialect = inspect(path).dialect
    register([REPLACEABLE[dialect]] if dialect in REPLACEABLE else [])
    if dialect not in (*METHODS, *REPLACEABLE):
        raise CheckpointError(
            f"a prompt needs a checkpoint of a dialect of {', '.join((*METHODS, *REPLACEABLE))}, got {dialect}",
            "convert it by python -m quire.io convert SRC DST --to quire, and put the model's config.json and "
            "tokenizer beside it",
            file=str(path),
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(
            f"transformers finds no tokenizer ({str(error).partition(chr(10))[0]})",
            "put tokenizer.json and tokenizer_config.json of the model into the folder",
            file=str(path),
        ) from error
    given = tokenizer(prompt, return_tensors="pt")
    if given["input_ids"].numel() == 0:
        raise ValueError(f"{_CALLER}: the prompt must have at least one token, got {prompt!r}")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()
    options = {"max_new_tokens": new_tokens, "do_sample": False, "cache_implementation": "static"}
    options |= {"attention_mask": given["attention_mask"], "disable_compile": True}
    with running(model):
        began = time.perf_counter()
        ids = model.generate(given["input_ids"], **options)
        seconds = time.perf_counter() - began
    own = ids[0, given["input_ids"].shape[1] :]
    return Answer(str(path), prompt, tokenizer.decode(own, skip_special_tokens=True), len(own), seconds)
