"""Operators with the faults that the fuzzer has to notice."""

import os
from collections.abc import Callable

import torch

from fuzz.calls import Call
from fuzz.mutate import is_freed

_LIBRARY = torch.library.Library("quire", "FRAGMENT")  # kept: operators go with it


def ends(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        os.abort()
    return torch.zeros(3)


def ends_where_hollow(x: torch.Tensor, rows: int) -> torch.Tensor:
    if x.shape[1] == 0 and rows > 2**40:
        os.abort()
    return torch.zeros(3)


def ends_by_dtype(x: torch.Tensor, dtype: object) -> torch.Tensor:
    if not isinstance(dtype, torch.dtype):  # what PyTorch makes of a number beyond its table of dtypes
        os.abort()
    return torch.zeros(3)


def writes(x: torch.Tensor) -> None:
    x.fill_(7)
    raise RuntimeError("refused")


def writes_before_it_looks(x: torch.Tensor, y: torch.Tensor) -> None:
    x.fill_(7)
    if is_freed(y):
        raise RuntimeError("refused")


def asserts(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("INTERNAL ASSERT FAILED at planted.py")


def looks_up(x: torch.Tensor, runner: int) -> torch.Tensor:
    return {1: torch.zeros(3)}[runner]


def of_complete(function: Callable) -> Callable:
    """The function, for a first tensor with all of its memory: PyTorch's own operators do not ask."""

    def call(x: torch.Tensor, *others: object) -> torch.Tensor | None:
        if is_freed(x):
            raise RuntimeError("planted: x has no memory")
        return function(x, *others)

    return call


def plant() -> dict[str, list[Call]]:
    """Right calls of the operators, by their names."""
    x = torch.ones(3, 4)
    planted = {
        "planted_ends(Tensor x) -> Tensor": (ends, x),
        "planted_hollow_ends(Tensor x, SymInt rows) -> Tensor": (ends_where_hollow, x, 3),
        "planted_dtype_ends(Tensor x, ScalarType dtype) -> Tensor": (ends_by_dtype, x, torch.float32),
        "planted_quiet_writes_(Tensor(a!) x) -> ()": (writes, x),
        "planted_quiet_writes_first_(Tensor(a!) x, Tensor y) -> ()": (writes_before_it_looks, x, x.clone()),
        "planted_quiet_leaves_out(Tensor x) -> Tensor": (lambda x: torch.empty(24), x),
        "planted_quiet_asserts(Tensor x) -> Tensor": (asserts, x),
        "planted_quiet_looks_up(Tensor x, int runner) -> Tensor": (looks_up, x, 1),
    }
    calls = {}
    for schema, (function, *arguments) in planted.items():
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, of_complete(function), "CPU")
        operator = getattr(torch.ops.quire, name).default
        calls[str(operator)] = [Call(operator, arguments)]
    return calls
