"""Runs of a model that only ask for the shapes of its results: they leave the states of layers as they were.

PipelineStage of torch.distributed.pipelining runs its part of a model once before the first step, unless it was given
input_args and output_args. The input is memory without values. Delayed scaling would take its amaxes for those of a
step, and stochastic rounding would count its backward pass.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from quire.nn.product_module import ProductModule

#: The methods of PipelineStage for such runs: since PyTorch 2.13, and before.
_METHODS = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")


def guard(stages: ModuleType) -> None:
    """Makes dry runs of pipeline stages leave states as they were. stages: torch.distributed.pipelining.stage; `import
    quire` has this called when it is imported."""
    for name in _METHODS:
        if hasattr(stages.PipelineStage, name):
            setattr(stages.PipelineStage, name, _leaving_states(getattr(stages.PipelineStage, name)))


def _leaving_states(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def leaving(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _states_restored(self.submod):
            return method(self, *args, **kwargs)

    return leaving


@contextlib.contextmanager
def _states_restored(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards all layers have the random states and the amaxes of before."""
    layers = [module for module in model.modules() if isinstance(module, ProductModule)]
    counters = [state for layer in layers for state in layer.sr_states().values()]
    delayed = [layer.of(product, "delayed") for layer in layers for product in layer.products]
    counted, collected = [counter.clone() for counter in counters], [state.collected() for state in delayed]
    try:
        yield
    finally:
        for counter, before in zip(counters, counted, strict=True):
            counter.data.copy_(before)
        for state, before in zip(delayed, collected, strict=True):
            state.restore(before)
