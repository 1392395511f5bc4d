"""The time that linear layers take on this machine, before and after conversion."""

import time
from collections.abc import Callable, Sequence

import torch

from quire.checks import check_type_or_none
from quire.conversion.inference import quantize_for_inference
from quire.nn.linear import Linear
from quire.recipe import Recipe
from quire.tensor import QuantizedTensor

#: What a measurement takes in all, unless three rounds of each call take longer.
SECONDS = 2.0
_LEAST_ROUNDS = 3


def check_tokens(what: str, tokens: int | None) -> None:
    """Raises TypeError unless tokens is None or an int, ValueError unless that is positive."""
    check_type_or_none(what, int, tokens=tokens)
    if tokens is not None and tokens < 1:
        raise ValueError(f"{what}: tokens must be at least 1, got {tokens}")


def has_values(layer: torch.nn.Linear) -> bool:
    """Whether a call can be timed: the weights have high-precision values."""
    return not layer.weight.is_meta and not isinstance(layer.weight, QuantizedTensor)


def alike(layers: Sequence[torch.nn.Linear]) -> list[list[torch.nn.Linear]]:
    """Layers of one kind, whose calls take the same time."""
    kinds: dict[tuple[object, ...], list[torch.nn.Linear]] = {}
    for layer in layers:
        kind = (layer.in_features, layer.out_features, layer.bias is None, layer.weight.dtype, layer.weight.device)
        kinds.setdefault(kind, []).append(layer)
    return list(kinds.values())


def best_of(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The shortest time of each call, in seconds. Calls take turns, so that other load of the machine affects all of
    them equally."""
    best, end, rounds = [float("inf")] * len(calls), time.perf_counter() + seconds, 0
    while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
        for i, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - begin)
        rounds += 1
    return best


def twin(layer: torch.nn.Linear) -> Linear:
    """A quire.Linear with the same parameters."""
    with torch.device("meta"):
        other = Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    other.weight, other.bias = layer.weight, layer.bias
    return other


def input_of(layer: torch.nn.Linear, tokens: int) -> torch.Tensor:
    """Normally distributed values [tokens, in_features] in the dtype and on the device of the layer."""
    shape = (tokens, layer.in_features)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(layer.weight.device, layer.weight.dtype)


def inference_call(layer: torch.nn.Linear, x: torch.Tensor, recipe: Recipe | None) -> tuple[Callable[[], object], int]:
    """A call of a layer like this one with weights for inference, and the bytes of its weight; without a recipe, a call
    of this layer itself. Use it under no_grad."""
    if recipe is None:
        return lambda: torch.nn.functional.linear(x, layer.weight, layer.bias), layer.weight.nbytes
    other = twin(layer)
    quantize_for_inference(other, recipe, {})
    return lambda: other(x), other.weight.nbytes


def training_call(layer: torch.nn.Linear, x: torch.Tensor, recipe: Recipe | None) -> tuple[Callable[[], object], int]:
    """A forward and a backward pass of a layer like this one, and the bytes of its weight."""
    other = twin(layer)
    other.weight = torch.nn.Parameter(layer.weight.detach())
    other.bias = None if layer.bias is None else torch.nn.Parameter(layer.bias.detach())
    other.recipe = recipe
    x = x.clone().requires_grad_()
    dy = torch.ones_like(other(x))

    def step() -> None:
        torch.autograd.grad(other(x), (x, *other.parameters()), dy)

    return step, layer.weight.nbytes


@torch.no_grad()
def compare(layer: torch.nn.Linear, recipe: Recipe, tokens: int, seconds: float) -> tuple[float, float]:
    """Seconds of one call of the layer with `tokens` rows, unconverted and with weights for inference."""
    x = input_of(layer, tokens)
    before, now = best_of([inference_call(layer, x, it)[0] for it in (None, recipe)], seconds)
    return before, now
