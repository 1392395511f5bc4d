"""Data parallelism within a graph: weights whose rows come together in each pass of a layer."""

import functools
import warnings
from typing import TYPE_CHECKING

import torch
from torch import distributed

from quire.checks import check_type
from quire.distributed import check_ranks
from quire.distributed.code_payload import why_not
from quire.distributed.gathered_weight import Shards
from quire.distributed.groups import broadcast
from quire.distributed.placements import check_own_parameter, is_dtensor, parameters_of_others
from quire.recipe import Recipe, as_recipe
from quire.tensor import QuantizedTensor, QuantSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_weights(model: torch.nn.Module, mesh: "DeviceMesh", recipe: Recipe | str | None = None) -> None:
    """Data parallelism in one graph: shards the rows of the weights over ranks, each of which has its own batch. The
    layers gather their weights by nodes of the graph, so torch.compile(fullgraph=True) captures the whole model.
    (fully_shard gathers them in hooks, which cannot be part of a graph.)

    Weights of Linear, LayerNormLinear and LayerNormMLP become DTensors Shard(0) with the values of the first rank.
    Forward gathers rowwise codes, and backward columnwise codes. Backward reduces and scatters the mean of the
    gradients. Between the passes a rank keeps only its rows. Values are gathered instead of codes without a recipe.
    With a warning, they are gathered too if shards do not end on blocks of the recipe (gather_codes).

    All other parameters stay whole on every rank. They get the values of the first rank. A hook computes the mean of
    their gradients; copies of the model do not have this hook. With a warning, this also holds for weights whose number
    of rows is not a multiple of the number of ranks, and for weights that are shared with a module that is not quire's.

    Args:
        model: the model. It changes in place.
        mesh: a mesh of one dimension.
        recipe: the recipe under which the layers will run. None: high precision. Another recipe gives right results
            too.

    Raises:
        ValueError: for a mesh of several dimensions.
        NotImplementedError: for delayed scaling, for weights that are quantized or DTensors already, and for main_grad
            and delay_wgrad_compute. The model is then unchanged.
    """
    import torch.distributed.tensor  # which takes longer to import than all of quire

    check_type("shard_weights", torch.nn.Module, model=model)
    recipe = as_recipe("shard_weights", recipe)
    if mesh.ndim != 1:
        raise ValueError(f"shard_weights: mesh must have one dimension, such as mesh['dp'], got {mesh}")
    if recipe is not None and recipe.delayed():
        refuse_delayed("shard_weights")
    layers = [module for module in model.modules() if hasattr(module, "products")]
    for layer in layers:
        _check(layer)
    fields = {f"parameter {name}": f"{p.dtype} {list(p.shape)}" for name, p in model.named_parameters()}
    group, device = mesh.get_group(), torch.device(mesh.device_type)
    check_ranks.agree(model, "shard_weights", (object(),), lambda: ("shard_weights", fields), group, device=device)
    shards, others = Shards(group), parameters_of_others(model)
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # layers may share one
    for layer in layers:
        for name in _rows_of_products(layer):
            weight = layer._parameters[name]
            what = f"shard_weights: quire.{type(layer).__name__}.{name}"
            if weight in others:
                warnings.warn(f"{what} is a parameter of another module too; each rank keeps all", stacklevel=2)
            elif weight in made or _fits(what, weight, shards.size, recipe):
                if weight not in made:
                    placed = distributed.tensor.distribute_tensor(weight.detach(), mesh, [distributed.tensor.Shard(0)])
                    made[weight] = torch.nn.Parameter(placed, weight.requires_grad)
                layer._parameters[name] = made[weight]
                layer.shards = {**(layer.shards or {}), name: shards}
    for parameter in model.parameters():
        if not is_dtensor(parameter):
            _keep_alike(parameter, group)


def refuse_delayed(what: str) -> None:
    """Raises NotImplementedError."""
    raise NotImplementedError(
        f"{what}: weights that shard_weights has sharded do not go with DelayedScaling; use Float8CurrentScaling, or "
        "fully_shard with quire.distributed.gather_codes"
    )


def _rows_of_products(layer: torch.nn.Module) -> list[str]:
    """The weights of a layer whose matmuls have one each, as a parameter."""
    names = [name for product in layer.products for name in layer.weights(product)]
    one_each = names == [f"{product}_weight" if product else "weight" for product in layer.products]
    weights = [layer._parameters.get(name) for name in names]
    return names if one_each and all(weight is not None and weight.dim() == 2 for weight in weights) else []


def _check(layer: torch.nn.Module) -> None:
    for name in layer.weight_names:
        what = f"shard_weights: quire.{type(layer).__name__}.{name}"
        check_own_parameter(what, layer, name)
        weight = layer._parameters[name]
        if is_dtensor(weight) or isinstance(weight, QuantizedTensor) or type(weight) is not torch.nn.Parameter:
            raise NotImplementedError(
                f"{what} must be a plain parameter, got a {type(weight).__name__}; call shard_weights once, on a model "
                "that is made outside of quire.quantized_model_init and that nothing else has sharded"
            )
        if layer.external_wgrad or any(layer.of(product, "parallel") is not None for product in layer.products):
            raise NotImplementedError(
                f"{what}: fuse_wgrad_accumulation, delay_wgrad_compute and parallel= do not go with sharded rows; make "
                "the layer without them"
            )


def _fits(what: str, weight: torch.Tensor, size: int, recipe: Recipe | None) -> bool:
    """Whether the rows are sharded. Warns if they are not, or if codes of the parts are not those of the whole."""
    rows = weight.shape[0]
    if rows % size:
        warnings.warn(f"{what}: its {rows} rows are no multiple of {size} ranks; each keeps all", stacklevel=3)
        return False
    reason = "" if recipe is None else why_not(QuantSpec(recipe.weight_spec), rows // size)
    if reason:
        warnings.warn(
            f"{what}: a part has {rows // size} rows, and {reason}; its values are gathered instead of codes",
            stacklevel=3,
        )
    return True


def _keep_alike(parameter: torch.nn.Parameter, group: "distributed.ProcessGroup") -> None:
    """The values of the first rank, and the mean of gradients."""
    broadcast(parameter.detach(), 0, group)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(functools.partial(_take_mean, group))


def _take_mean(group: "distributed.ProcessGroup", parameter: torch.Tensor) -> None:
    distributed.all_reduce(parameter.grad, group=group)
    parameter.grad /= group.size()
