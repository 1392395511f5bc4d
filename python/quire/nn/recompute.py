"""Activation checkpointing that recomputes a forward pass with the same recipe and scales."""

import functools
import inspect
from collections.abc import Callable

import torch
import torch.utils.checkpoint

from quire.autocast import Reentered
from quire.checks import check_type
from quire.delayed import RecordedScales
from quire.nn import same_recipe

#: Keywords that torch.utils.checkpoint.checkpoint has for itself.
_OWN = {"preserve_rng_state"} | {
    name
    for name, parameter in inspect.signature(torch.utils.checkpoint.checkpoint).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}

same_recipe.notice()


def checkpoint(function: Callable[..., object], *args: object, use_reentrant: bool = False, **kwargs: object) -> object:
    """torch.utils.checkpoint.checkpoint(function, *args), with one addition: backward recomputes function with the
    present recipe and the present scales of delayed scaling. So backward can run outside of quire.autocast, in another
    thread, and after other forward passes.

    use_reentrant and further keywords are arguments of torch.utils.checkpoint, or of function. Within a compiled
    function the checkpoint is a part of the graph.
    """
    check_type("quire.checkpoint", Callable, function=function)
    check_type("quire.checkpoint", bool, use_reentrant=use_reentrant)
    if torch.compiler.is_compiling():  # a graph computes again what it has computed, and its scales are its inputs
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    if use_reentrant:  # PyTorch's takes no keywords of the function
        function = functools.partial(function, **{name: kwargs.pop(name) for name in kwargs.keys() - _OWN})
    recipe, scales = Reentered(), RecordedScales()

    def as_now(*args: object, **kwargs: object) -> object:
        with recipe, scales:
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(as_now, *args, use_reentrant=use_reentrant, **kwargs)
