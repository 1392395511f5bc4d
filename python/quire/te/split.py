"""A Linear whose weight and bias are several parameters, one for each part of the outputs (parameters_split)."""

from collections.abc import Mapping, Sequence

import torch

from quire.nn.initial_values import initialise
from quire.nn.linear import Linear
from quire.te.arguments import refuse
from quire.tensor import QuantizedTensor

_OPTIONS = {"fuse_wgrad_accumulation": False, "delay_wgrad_compute": False}


class SplitLinear(Linear):
    """A quire.Linear that has parameters q_weight, k_weight, q_bias, ... for parameters_split=("q", "k").

    `weight` and `bias` are their concatenations, made anew each time they are read.
    """

    part_sizes: tuple[int, ...]

    @property
    def weight(self) -> torch.Tensor:
        return torch.cat([self._parameters[name] for name in self.weight_names])

    @property
    def bias(self) -> torch.Tensor | None:
        return torch.cat([self._parameters[name] for name in self.bias_names]) if self.bias_names else None

    def reset_parameters(self, defer_init: bool = False) -> None:
        """As quire.Linear's, with the values that the unsplit layer would get. With defer_init, nothing."""
        if defer_init:
            return
        with torch.no_grad():
            weight, bias = (None if own is None else torch.empty_like(own) for own in (self.weight, self.bias))
            initialise(weight, bias, self.init_method, self.parallel)
            for names, values in ((self.weight_names, weight), (self.bias_names, bias)):
                for name, part in zip(names, () if values is None else values.split(self.part_sizes), strict=True):
                    self._parameters[name].copy_(part)
        self._reset_sr_states()


def split(layer: Linear, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Makes a layer that has just been constructed a SplitLinear, of parts with these names and numbers of outputs.
    Raises NotImplementedError for what does not go with parts."""
    given = {name: getattr(layer, name) for name in _OPTIONS}
    refuse("quire.Linear with parameters_split", given, _OPTIONS)
    if type(layer) is not Linear or isinstance(layer.weight, QuantizedTensor):
        what = "within quantized_model_init" if type(layer) is Linear else f"in {type(layer).__name__}, a subclass"
        raise NotImplementedError(
            f"quire.Linear: parameters_split is not available {what}; use a layer for each part, or split the result"
        )
    split_up = {kind: layer._parameters.pop(kind) for kind in ("weight", "bias")}
    layer.__class__ = SplitLinear
    layer.part_sizes, layer.weight_names, layer.bias_names = tuple(sizes), (), ()
    for kind, values in split_up.items():
        if values is None:
            continue
        kind_names = tuple(f"{name}_{kind}" for name in names)
        setattr(layer, f"{kind}_names", kind_names)
        for name, part in zip(kind_names, values.detach().split(sizes), strict=True):
            layer.register_parameter(name, torch.nn.Parameter(part.clone()))


def names_and_sizes(parts: Sequence[str] | Mapping[str, int], rows: int) -> tuple[list[str], tuple[int, ...]]:
    """Of parameters_split: names of equal parts of `rows` outputs, or name -> size. Raises ValueError where they do not
    fit."""
    wrong = isinstance(parts, str) or not isinstance(parts, Mapping | Sequence)
    names = [] if wrong else [str(name).rstrip("_") for name in parts]
    sizes = tuple(parts.values()) if isinstance(parts, Mapping) else (rows // max(len(names), 1),) * len(names)
    whole = all(isinstance(size, int) and size >= 0 for size in sizes) and sum(sizes) == rows
    if not names or len(set(names)) < len(names) or "" in names or not whole:
        raise ValueError(
            "quire.Linear: parameters_split must be different names of parts of equal size, or name -> size, that "
            f"make up out_features = {rows}; got {parts!r}"
        )
    return names, sizes
