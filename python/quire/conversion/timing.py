"""The time that linear layers take on this machine, before and after conversion."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.checks import check_type_or_none
from quire.conversion.inference import quantize_for_inference
from quire.nn.linear import Linear
from quire.nn.own_context import running
from quire.recipe import Recipe
from quire.tensor import QuantizedTensor

#: The duration of a measurement, unless three rounds of each call take longer.
SECONDS = 2.0
_LEAST_ROUNDS = 3
#: A call that takes this much longer than another one is slower, and not only measured at a bad moment.
_SLOWER = 1.05
#: More than the caches of a core and its neighbours hold, in bytes.
_CACHES = 1 << 26


@dataclass(frozen=True)
class Kind:
    """Layers of one kind. seconds: of a call of one of them, first as it is and then under each recipe. weight_bytes:
    the bytes of its weight, likewise."""

    layers: list[torch.nn.Linear]
    seconds: list[float]
    weight_bytes: list[int]


def slower(before: float, now: float) -> bool:
    """Whether a layer that took `before` seconds and takes `now` is not worth converting."""
    return now > _SLOWER * before


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


def best_of(calls: Sequence[Callable[[], object]], others: Sequence[int], seconds: float) -> list[float]:
    """The shortest time of each call, in seconds. Calls take turns, so that other load of the machine affects all of
    them equally.

    others: for each call, how many bytes the model reads between two calls of the same layer. A layer of a small model
    finds its weights in a cache, one of a large model does not.
    """
    rest = torch.zeros(min(max(others), _CACHES) // 8, dtype=torch.int64, device="cpu")
    best, end, rounds = [float("inf")] * len(calls), time.perf_counter() + seconds, 0
    while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
        for i, call in enumerate(calls):
            if others[i] < _CACHES:
                call()
            rest[: others[i] // 8].sum()
            begin = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - begin)
        rounds += 1
    return best


def twin(layer: torch.nn.Linear) -> Linear:
    """A quire.Linear with the same parameters. A parameter that is computed in every call is replaced by its values."""
    with torch.device("meta"):
        other = Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    for name in ("weight", "bias"):
        value = getattr(layer, name)
        parameter = value is None or isinstance(value, torch.nn.Parameter)
        setattr(other, name, value if parameter else torch.nn.Parameter(value.detach()))
    return other


def input_of(layer: torch.nn.Linear, tokens: int) -> torch.Tensor:
    """Normally distributed values [tokens, in_features] in the dtype and on the device of the layer."""
    shape = (tokens, layer.in_features)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return values.to(layer.weight.device, layer.weight.dtype)


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


def measure(
    layers: Sequence[torch.nn.Linear], recipes: Sequence[Recipe], tokens: int, training: bool = False
) -> list[Kind]:
    """Times one layer of each kind with `tokens` rows, in about SECONDS altogether, within the caller's torch.autocast.

    layers: all layers of the model that are to be timed. training: forward and backward passes.
    """
    kinds, total = alike(layers), sum(layer.weight.nbytes for layer in layers)
    call_of = training_call if training else inference_call
    found = []
    with running(torch_autocast=True), torch.set_grad_enabled(training):
        for same in kinds:
            x, own = input_of(same[0], tokens), max(1, same[0].weight.nbytes)
            calls, sizes = zip(*[call_of(same[0], x, it) for it in (None, *recipes)], strict=True)
            others = [total * size // own - size for size in sizes]
            found.append(Kind(same, best_of(calls, others, SECONDS / len(kinds)), list(sizes)))
    return found
