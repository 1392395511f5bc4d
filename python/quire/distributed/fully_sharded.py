"""Data parallelism with fully_shard that gathers codes of weights."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from quire.checks import check_type
from quire.distributed.gathering import COLUMNWISE, Gathering
from quire.distributed.master_shard import MasterShard, Options
from quire.distributed.placements import check_own_parameter, is_dtensor, parameters_of_others, placed_like
from quire.recipe import Recipe, as_recipe
from quire.tensor import QuantizedTensor


def gather_codes(model: torch.nn.Module, recipe: Recipe | str, *, recompute: bool = False) -> None:
    """After this call, fully_shard gathers codes of the weights of quire's layers instead of the weights. Call it
    before fully_shard.

    Parameters keep their dtype, and optimizers update their values. Each rank quantizes its own rows. Codes and scales
    are then gathered: rowwise ones for forward, columnwise ones for backward. If the weight is not resharded after
    forward, both are gathered at once. Results have the same bits as if weights were gathered and then quantized.
    Amaxes of whole weights are reduced before, in one collective for all weights that are gathered together. Gradients
    are reduced and scattered in high precision.

    Some weights are gathered as values, with a warning: weights whose shards are not equal or do not end on blocks (of
    32 rows for MXFP8 and MXFP4, 16 for NVFP4, 128 for fp8_block), weights of three dimensions, weights of layers with
    parameters_split, and weights that are shared with a module that is not quire's, such as an embedding.

    A quantized weight (quantized_model_init) must have a master and the dtype float32. Its master becomes the
    parameter.

    Args:
        model: the model. It changes in place.
        recipe: the recipe under which the layers will run.
        recompute: True if backward runs the forward pass again (activation checkpointing). Backward then gathers codes
            of both directions.

    Raises:
        ValueError: if the recipe's backward pass needs weights in high precision, and if the model has no layers of
            quire.
        NotImplementedError: for a weight that is a DTensor already, that is quantized without a master, or whose
            gradient goes to main_grad or backward_dw(). The model is then unchanged.
    """
    check_type("gather_codes", torch.nn.Module, model=model)
    check_type("gather_codes", bool, recompute=recompute)
    recipe = as_recipe("gather_codes", recipe)
    check_type("gather_codes", Recipe, recipe=recipe)
    _check_recipe(recipe)
    layers = [module for module in model.modules() if hasattr(module, "products")]
    if not layers:
        raise ValueError(
            f"gather_codes: {type(model).__name__} has no layers of quire, whose weights could be gathered as codes; "
            "convert it with quire.convert first"
        )
    others = parameters_of_others(model)
    found = [(layer, *each) for layer in layers for each in _weights(layer, recipe, recompute, others)]
    gathering: dict[torch.nn.Module, Gathering] = {}
    made: dict[int, torch.nn.Parameter] = {}  # layers may share one
    for layer, name, weight, master in found:
        setattr(layer, name, made.setdefault(id(weight), torch.nn.Parameter(master, weight.requires_grad)))
        gathering.setdefault(layer, Gathering(model))
    for layer, own in gathering.items():
        layer.gathering = own
        layer.register_state_dict_post_hook(_plain_state)


def _weights(
    layer: torch.nn.Module, recipe: Recipe, recompute: bool, others: set[torch.nn.Parameter]
) -> Iterator[tuple[str, torch.nn.Parameter, MasterShard]]:
    """Name, parameter and new parameter of the weights of a layer that can be gathered as codes."""
    kind = type(layer).__name__
    for name in layer.weight_names:
        what = f"gather_codes: quire.{kind}.{name}"
        check_own_parameter(what, layer, name)
        weight = layer._parameters[name]
        _check_weight(what, layer, weight)
        if weight.dim() != 2 or name not in _named(layer) or weight in others:
            why = "has three dimensions" if weight.dim() != 2 else "is a part of a weight"
            why = "is a parameter of another module too" if weight in others else why
            warnings.warn(f"{what} {why}; its values are gathered instead, and quantized afterwards", stacklevel=3)
            continue
        exact = isinstance(weight, QuantizedTensor)
        values = weight.master if exact else weight.detach()
        from_codes = recipe.backward_override == "dequantized"
        slot = _slot(layer, name) if recipe.delayed() else None
        options = Options(f"quire.{kind}", name, recipe.weight_spec, from_codes, recompute, exact, slot)
        yield name, weight, MasterShard(values, options)


def _slot(layer: torch.nn.Module, name: str) -> tuple[str, int]:
    """The matmul of a weight, and the slot of its forward scales that the weight has."""
    for product in layer.products:
        names = list(layer.weights(product))
        if name in names:
            return product, layer.groups + names.index(name)
    raise AssertionError("unreachable")


def _named(layer: torch.nn.Module) -> set[str]:
    """The names of the weights that matmuls read as they are."""
    return {name for product in layer.products for name in layer.weights(product)}


def _check_recipe(recipe: Recipe) -> None:
    if recipe.delayed() and len(recipe.delayed_operands) < 3:
        raise NotImplementedError(
            f"gather_codes: delayed scaling of {' and '.join(recipe.delayed_operands)} alone is not available; give "
            "all operands of a matmul delayed scaling, or none"
        )
    if recipe.backward_override == "high_precision":
        raise ValueError(
            f"gather_codes: the backward pass of {type(recipe).__name__}(backward_override='high_precision') needs "
            "weights and not codes; leave gather_codes out, or use backward_override='dequantized' or None"
        )


def _check_weight(what: str, layer: torch.nn.Module, weight: torch.Tensor) -> None:
    if is_dtensor(weight) or isinstance(weight, MasterShard):
        how = f"is a DTensor with {weight.placements}" if is_dtensor(weight) else "is prepared already"
        raise NotImplementedError(
            f"{what} {how}; call gather_codes once, before fully_shard, and leave out layers that parallelize_module "
            "has sharded, whose weights are gathered as they are"
        )
    if isinstance(weight, QuantizedTensor) and (weight.master is None or weight.dtype != torch.float32):
        raise NotImplementedError(
            f"{what} is quantized, with the dtype {weight.dtype} and {'no' if weight.master is None else 'a'} master; "
            "make the model in float32 within quire.quantized_model_init(keep_master=True), and let "
            "MixedPrecisionPolicy(param_dtype=...) choose another dtype"
        )
    if layer.external_wgrad:
        raise NotImplementedError(
            f"{what}: fuse_wgrad_accumulation and delay_wgrad_compute keep gradients of weights from fully_shard, "
            "which reduces and scatters them; leave these options out"
        )


def _plain_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Makes the entries of a state_dict plain tensors, or DTensors of plain tensors, of the same memory."""
    for name in module.weight_names:
        value = state.get(prefix + name)
        if isinstance(value, torch.nn.Parameter):
            continue  # keep_vars
        part = value._local_tensor if is_dtensor(value) else value
        if isinstance(part, MasterShard):
            state[prefix + name] = placed_like(value, part.values)


def check_gathered(layer: torch.nn.Module, product: str, recipe: Recipe) -> None:
    """Raises RuntimeError if the codes that a forward pass needs have not been gathered."""
    what, gathering = f"quire.{type(layer).__name__}", layer.gathering
    for name, weight in layer.weights(product).items():
        if isinstance(weight, QuantizedTensor) and weight.spec_text != recipe.weight_spec:
            raise RuntimeError(
                f"{what}: codes of {name} are gathered as {weight.spec_text}, and the active recipe, "
                f"{type(recipe).__name__}, quantizes weights as {recipe.weight_spec}; pass one recipe to gather_codes "
                "and to autocast"
            )
        if gathering.directions.get(name) == COLUMNWISE:
            raise RuntimeError(
                f"{what}: the gather of this backward pass has only brought the columnwise codes of {name}, and the "
                "layer's forward pass runs again (activation checkpointing); prepare the model with "
                "quire.distributed.gather_codes(model, recipe, recompute=True)"
            )


def gathered_amaxes(layer: torch.nn.Module, product: str) -> torch.Tensor | None:
    """float32, one for each weight of a matmul: amaxes of weights whose codes were gathered; None for other weights."""
    if layer.gathering is None:
        return None
    each = [layer.gathering.amaxes.get(name) for name in layer.weights(product)]
    return None if None in each else torch.cat([rowwise for rowwise, _ in each])
