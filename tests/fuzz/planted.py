"""Operators with the faults that the fuzzer has to notice."""

import os

import torch

_LIBRARY = torch.library.Library("quire", "FRAGMENT")  # kept: operators go with it


def plant() -> None:
    def ends(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            os.abort()
        return x.clone()

    def writes(x: torch.Tensor) -> None:
        x.fill_(7)
        raise RuntimeError("refused")

    def asserts(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("INTERNAL ASSERT FAILED at planted.py")

    for function, schema in (
        (ends, "planted_ends(Tensor x) -> Tensor"),
        (writes, "planted_quiet_writes_(Tensor(a!) x) -> ()"),
        (lambda x: torch.empty(24), "planted_quiet_leaves_out(Tensor x) -> Tensor"),
        (asserts, "planted_quiet_asserts(Tensor x) -> Tensor"),
    ):
        _LIBRARY.define(schema)
        _LIBRARY.impl(schema.partition("(")[0], function, "CPU")
