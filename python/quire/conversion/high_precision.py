"""What stays in high precision after a conversion, and what to know of it."""

from collections.abc import Iterator

import torch

from quire.conversion.report import ParameterReport, percent
from quire.nn.product_module import ProductModule

#: A model of which more stays in high precision gets a note.
_MOST = 0.5


def notes_on_fast_paths(model: torch.nn.Module, chosen: list[torch.nn.Module]) -> Iterator[str]:
    """Where PyTorch computes past converted layers."""
    past = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.TransformerEncoderLayer)
        and not set(chosen).isdisjoint((module.linear1, module.linear2))
    ]
    if past and torch.backends.mha.get_fastpath_enabled():
        yield (
            "in inference torch.nn.TransformerEncoderLayer may compute past its layers, in high precision; "
            "torch.backends.mha.set_fastpath_enabled(False) makes it call them"
        )


def left_parameters(model: torch.nn.Module) -> tuple[ParameterReport, ...]:
    """What ParameterReport describes, in the model's order. Layers of quire quantize their weights themselves."""
    names: dict[torch.Tensor, list[str]] = {}
    owners: dict[torch.Tensor, list[torch.nn.Module]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        owner = _owner(model, prefix, module)
        for name, p in module.named_parameters(recurse=False):
            if torch.nn.parameter.is_lazy(p) or not p.is_floating_point() or p.dim() < 2:
                continue
            if isinstance(module, torch.nn.Linear) or min(p.shape[-2:]) > 1:
                names.setdefault(p, []).append(f"{prefix}.{name}" if prefix else name)
                owners.setdefault(p, []).append(owner)
    lookups = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    read = [p for p, modules in owners.items() if not all([isinstance(m, lookups) for m in modules])]
    total = sum(p.numel() for p in read)
    left = []
    for p in read:
        modules = [m for m in owners[p] if not isinstance(m, lookups)]
        if not all([isinstance(m, ProductModule) for m in modules]):
            left.append(ParameterReport(tuple(names[p]), tuple(p.shape), p.numel() / total, type(modules[0]).__name__))
    return tuple(left)


def _owner(model: torch.nn.Module, prefix: str, module: torch.nn.Module) -> torch.nn.Module:
    """The module whose weight is computed from the module's parameters: that of a parametrization, or the module."""
    outer, found, _ = f".{prefix}.".partition(".parametrizations.")
    return model.get_submodule(outer.strip(".")) if found else module


def left_notes(left: tuple[ParameterReport, ...]) -> Iterator[str]:
    share = sum(p.share for p in left)
    if share >= _MOST:
        largest = max(left, key=lambda p: p.share)
        yield (
            f"{percent(share)} of the weights that matmuls may read stay in high precision, the most in "
            f"{largest.names[0]} {list(largest.shape)} of {largest.owner}"
        )
