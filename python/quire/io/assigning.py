"""Values of a checkpoint, put into the modules of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quire.io.fitting import Target
from quire.io.gate_up import alternating, of_weight
from quire.io.joining import join, of_one
from quire.io.layout import Layout
from quire.io.reading import Checkpoint
from quire.io.stored import StoredWeight
from quire.nn.linear import Linear
from quire.nn.random_state import reset_streams
from quire.nn.stacked_experts import StackedExperts, is_experts
from quire.recipe import Recipe, as_recipe
from quire.tensor import QuantizedStack, QuantizedTensor
from quire.tensor.origin import Origin


@dataclass
class Layer:
    """How the quantized weights of one module are made. scales: the static scale of the input of each matrix, [1]."""

    path: str
    targets: list[Target] = field(default_factory=list)
    layout: Layout | None = None
    spec: str = ""
    recipe: Recipe | None = None
    scales: list[torch.Tensor | None] = field(default_factory=list)


def load_layer(stored: StoredWeight, layout: Layout, index: int | None = None) -> Linear:
    """A layer by itself, as load() would make it. index: of a matrix of a stack."""
    one = of_one(stored, index)
    rows, columns = one.weight.shape
    layer = Linear(columns, rows, one.bias is not None, one.weight.dtype, "meta")
    static = layout.calibrated and one.input_scale is not None
    layer.weight = torch.nn.Parameter(one.weight, requires_grad=False)
    if one.bias is not None:
        layer.bias = torch.nn.Parameter(one.bias.to(one.weight.dtype), requires_grad=False)
    layer.recipe = recipe_of(layout.static if static else layout.dynamic, one.weight.spec_text)
    layer.place_states()
    weight = Target(layer.weight, [("", layer, "weight")])
    _give_scales(layer, Layer("", [weight], scales=[one.input_scale]))
    return layer


def _give_scales(module: torch.nn.Module, layer: Layer) -> None:
    """The buffers that a recipe with static scales of inputs reads."""
    module.add_input_scales()
    if not module.recipe.static_input:
        return
    rest, found = list(layer.scales), {}
    for target in layer.targets:
        attribute = next(attribute for _, owner, attribute in target.owners if owner is module)
        count = module.groups if target.value.dim() == 3 else 1
        found.setdefault(module.scale_name(attribute), []).extend(rest[:count])
        rest = rest[count:]
    for name, scales in found.items():
        getattr(module, name).copy_(torch.cat(scales))


def recipe_of(x: str, w: str) -> Recipe:
    """Gradients are computed of decoded weights: files have the codes of one direction."""
    dy = "none" if x == "none" else "mxfp8"  # which is not used
    return as_recipe("quire.io.load", f"x={x},w={w},dy={dy},backward=dequantized")


def apply(plain: Sequence[Target], layers: Mapping[int, Layer], checkpoint: Checkpoint) -> None:
    from tqdm import tqdm

    work = [(target, None) for target in plain]
    work += list({id(target): (target, layer) for layer in layers.values() for target in layer.targets}.values())
    # A bar appears after a second, where someone watches.
    for target, layer in tqdm(work, desc="quire.io.load", unit="tensor", delay=1, disable=None):
        value = _plain(target, checkpoint) if layer is None else _weight(target, layer, checkpoint)
        _assign(target, value)
    modules = {id(module): module for layer in layers.values() for t in layer.targets for _, module, _ in t.owners}
    new = []
    for number, module in modules.items():
        if type(module) is torch.nn.Linear:
            new.append(Linear.adopt(module, layers[number].recipe))
        elif is_experts(module):
            StackedExperts.adopt(module, layers[number].recipe).reset_states()
        module.recipe = layers[number].recipe
        _give_scales(module, layers[number])
        module._forget_weights()
        module.place_states()
    reset_streams([layer.sr_state for layer in new], [layer.take_stream() for layer in new])


def _plain(target: Target, checkpoint: Checkpoint) -> torch.Tensor:
    each = []
    for matrix in target.source.matrices:
        parts = [_tensor(ref.entry, target, checkpoint) for ref in matrix]
        parts = [part if ref.index is None else part[ref.index] for ref, part in zip(matrix, parts, strict=True)]
        each.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return torch.stack(each) if target.source.stacked else each[0]


def _tensor(name: str, target: Target, checkpoint: Checkpoint) -> torch.Tensor:
    if name not in checkpoint.biases:
        value = checkpoint.container.tensor(name)
        # torch.cat, which joins the parts of a parameter, takes no tensors of codes.
        return value.to(target.value.dtype) if name in checkpoint.unscaled else value
    moved = target.alternates and checkpoint.groups[checkpoint.biases[name]].layout.alternating
    bias = checkpoint.bias(name)
    return alternating(bias) if moved else bias


def _weight(target: Target, layer: Layer, checkpoint: Checkpoint) -> QuantizedTensor:
    matrices, origins = [], []
    for matrix in target.source.matrices:
        parts = [of_one(checkpoint[ref.entry], ref.index) for ref in matrix]
        origins += [part.origin for part in parts]
        whole = join([part.weight for part in parts], layer.spec)
        moved = target.alternates and checkpoint.groups[matrix[0].entry].layout.alternating
        matrices.append(of_weight(alternating, whole) if moved else whole)
    found = QuantizedStack.of(matrices) if target.source.stacked else matrices[0]
    dtype = target.value.dtype if target.value.dtype.is_floating_point else None
    found = found.to(device=None if target.value.is_meta else target.value.device, dtype=dtype)
    first = origins[0]
    found.remember(first if len(origins) == 1 else Origin(first.dialect, first.layout, parts=tuple(origins)))
    return found


def _assign(target: Target, value: torch.Tensor) -> None:
    old = target.value
    if not isinstance(value, QuantizedTensor):
        value = value.to(old.dtype)
        if not old.is_meta and not isinstance(old, QuantizedTensor):
            old.copy_(value)
            return
    is_parameter = isinstance(old, torch.nn.Parameter)
    new = torch.nn.Parameter(value, requires_grad=old.requires_grad) if is_parameter else value
    for _, module, attribute in target.owners:
        setattr(module, attribute, new)
