"""How well a language model predicts a fixed text: docstrings of Python's standard library."""

import ast
import inspect
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

#: Modules whose docstrings are the text to predict, and others whose docstrings are for calibration.
EVALUATED = ("argparse", "datetime", "difflib", "doctest", "fractions", "heapq", "random", "statistics", "textwrap")
CALIBRATED = ("_pydecimal", "calendar", "contextlib", "csv", "functools", "locale", "shutil", "tempfile", "zipfile")


def docstrings(modules: tuple[str, ...]) -> str:
    """All docstrings of modules of the standard library, in order. They differ a little between versions of Python."""
    return "\n\n".join(text for name in modules for text in _of_module(name))


def _of_module(name: str) -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    source = next(path for path in (folder / f"{name}.py", folder / name / "__init__.py") if path.exists())
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield inspect.cleandoc(text)


def windows(tokenizer, modules: tuple[str, ...], count: int, length: int) -> torch.Tensor:
    """int64 [count, length]: the first tokens of the docstrings. Raises ValueError if there are fewer."""
    tokens = tokenizer.encode(docstrings(modules)).ids
    if len(tokens) < count * length:
        raise ValueError(f"the docstrings of {', '.join(modules)} have {len(tokens)} tokens, fewer than asked for")
    return torch.tensor(tokens[: count * length]).view(count, length)


@torch.no_grad()
def losses(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [rows, length - 1]: the loss of every token but the first of each row. tokens: int64 [rows, length]."""
    found = []
    for row in tokens:
        logits = model(row[None, :-1])[0].float()
        found.append(F.cross_entropy(logits, row[1:], reduction="none"))
    return torch.stack(found).double()


def perplexity(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """exp of the mean loss of the tokens. tokens: int64 [rows, length]."""
    return math.exp(losses(model, tokens).mean())
