"""Weights that hooks of PyTorch compute from other parameters before every call of their module."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


class Kind(NamedTuple):
    """A forward pre-hook that computes an attribute of a module. title: how it is called. attribute: of the hook, with
    the name of the tensor. value: what the tensor is in evaluation mode. sources: the endings of the parameters and
    buffers that it is computed from."""

    hook: type
    title: str
    attribute: str
    value: Callable[[Any, torch.nn.Module], torch.Tensor]
    sources: tuple[str, ...]


_KINDS = (
    Kind(BasePruningMethod, "prune", "_tensor_name", lambda hook, layer: hook.apply_mask(layer), ("_orig", "_mask")),
    Kind(WeightNorm, "weight_norm", "name", lambda hook, layer: hook.compute_weight(layer), ("_g", "_v")),
    Kind(
        SpectralNorm,
        "spectral_norm",
        "name",
        lambda hook, layer: hook.compute_weight(layer, do_power_iteration=False),
        ("_orig", "_u", "_v"),
    ),
)


def computing_hooks(layer: torch.nn.Module) -> list[tuple[str, Kind, Any]]:
    """Name of each tensor that a hook computes, and the hook."""
    return [
        (getattr(hook, kind.attribute), kind, hook)
        for hook in layer._forward_pre_hooks.values()
        for kind in _KINDS
        if isinstance(hook, kind.hook)
    ]


def compute_weights(layer: torch.nn.Module) -> None:
    """What a call of the layer would do first, for a module that reads its weights without calling it."""
    if layer._forward_pre_hooks:
        for _, _, hook in computing_hooks(layer):
            hook(layer, ())
