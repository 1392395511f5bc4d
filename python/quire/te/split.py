"""Layers whose weight and bias are several parameters, one for each part of the outputs (parameters_split)."""

from collections.abc import Mapping, Sequence

import torch

from quire.distributed.parallel import Parallel
from quire.nn.initial_values import initialise
from quire.nn.layernorm_linear import LayerNormLinear
from quire.nn.norm import reset_norm
from quire.nn.product_module import ProductModule
from quire.te.arguments import refuse
from quire.tensor import QuantizedTensor

_OPTIONS = {"fuse_wgrad_accumulation": False, "delay_wgrad_compute": False}


class Split(ProductModule):
    """A layer that has parameters q_weight, k_weight, q_bias, ... for parameters_split=("q", "k").

    `weight` and `bias` are their concatenations, made anew each time they are read. The parts may be computed from
    other parameters (pruned, parametrized).
    """

    part_sizes: tuple[int, ...]

    @property
    def weight(self) -> torch.Tensor:
        return torch.cat([getattr(self, name) for name in self.weight_names])

    @property
    def bias(self) -> torch.Tensor | None:
        return torch.cat([getattr(self, name) for name in self.bias_names]) if self.bias_names else None

    def own_parts(self) -> dict[str, Parallel]:
        if not self.has_parts:
            return {}
        each = self.parallel.of_one_part()
        return dict.fromkeys(self.weight_names + (self.bias_names if each.mode == "column" else ()), each)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """As the unsplit layer's, with the values that it would get. With defer_init, nothing."""
        if defer_init:
            return
        if isinstance(self, LayerNormLinear):
            reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        with torch.no_grad():
            weight, bias = (None if own is None else torch.empty_like(own) for own in (self.weight, self.bias))
            initialise(weight, bias, self.init_method, self.parallel)
            for names, values in ((self.weight_names, weight), (self.bias_names, bias)):
                for name, part in zip(names, () if values is None else values.split(self.part_sizes), strict=True):
                    self._parameters[name].copy_(part)
        self._reset_sr_states()


def split(layer: ProductModule, into: type[Split] | None, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Makes a layer that has just been constructed one of parts with these names and numbers of outputs. into: its
    class with parts, None where there is none. Raises NotImplementedError for what does not go with parts."""
    kind, given = type(layer), {name: getattr(layer, name) for name in _OPTIONS}
    refuse(f"quire.{kind.__name__} with parameters_split", given, _OPTIONS)
    if into is None or isinstance(layer.weight, QuantizedTensor):
        what = f"in {kind.__name__}, a subclass" if into is None else "within quantized_model_init"
        raise NotImplementedError(
            f"quire.{kind.__name__}: parameters_split is not available {what}; use a layer for each part, or split the "
            "result (of MultiheadAttention and TransformerLayer: pass fuse_qkv_params=True)"
        )
    split_up = {what: layer._parameters.pop(what) for what in ("weight", "bias")}
    layer.__class__ = into
    layer.part_sizes, layer.weight_names, layer.bias_names = tuple(sizes), (), ()
    for what, values in split_up.items():
        if values is None:
            continue
        part_names = tuple(f"{name}_{what}" for name in names)
        setattr(layer, f"{what}_names", part_names)
        for name, part in zip(part_names, values.detach().split(sizes), strict=True):
            layer.register_parameter(name, torch.nn.Parameter(part.clone()))


def names_and_sizes(
    what: str, parts: Sequence[str] | Mapping[str, int], rows: int
) -> tuple[list[str], tuple[int, ...]]:
    """Of parameters_split: names of equal parts of `rows` outputs, or name -> size. Raises ValueError where they do not
    fit."""
    wrong = isinstance(parts, str) or not isinstance(parts, Mapping | Sequence)
    names = [] if wrong else [str(name).rstrip("_") for name in parts]
    sizes = tuple(parts.values()) if isinstance(parts, Mapping) else (rows // max(len(names), 1),) * len(names)
    whole = all(isinstance(size, int) and size >= 0 for size in sizes) and sum(sizes) == rows
    if not names or len(set(names)) < len(names) or "" in names or not whole:
        raise ValueError(
            f"{what}: parameters_split must be different names of parts of equal size, or name -> size, that "
            f"make up out_features = {rows}; got {parts!r}"
        )
    return names, sizes
