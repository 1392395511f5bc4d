"""Tensors that torch.distributed.tensor shards over ranks (DTensor): this rank's shard of them, and calls of
layers whose x is one."""

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed
from torch.utils import _pytree as pytree

from quire.distributed import one_process
from quire.distributed.parallel import Parallel
from quire.functional import operators
from quire.loading.deferred import when_imported

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    Placements = tuple[Placement, ...]
else:
    DTensor = Partial = Replicate = Shard = ()  # isinstance(t, ()) is False

#: Classes of which no tensor is a DTensor.
PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


def _take_classes(module: ModuleType) -> None:
    for name in ("DTensor", "Partial", "Replicate", "Shard"):
        globals()[name] = getattr(module, name)
    # PyTorch has no public way. Where it has no such table, its own error says that there is no sharding strategy.
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    handlers.update(dict.fromkeys(operators(), _refuse_in_operator))


def _refuse_in_operator(operator: "OpOverload", args: tuple, kwargs: Mapping[str, Any]) -> None:
    placements = next(t.placements for t in pytree.tree_leaves((args, kwargs)) if is_dtensor(t))
    raise NotImplementedError(
        f"{operator.name().partition('::')[2]}: an argument is a DTensor with {placements}, and the operator computes "
        "from plain tensors; pass t.to_local(), this rank's shard, or t.full_tensor(), the whole tensor, which all "
        "ranks must call"
    )


# It takes longer to import than all of quire. Before it is imported, no tensor is a DTensor.
when_imported("torch.distributed.tensor", _take_classes)


def is_dtensor(t: object) -> bool:
    """Whether ranks of a mesh have parts of t."""
    return type(t) not in PLAIN and isinstance(t, DTensor)


def parameters_of_others(model: torch.nn.Module) -> set[torch.nn.Parameter | None]:
    """The parameters that modules of the model have which are no layers of quire."""
    return {own for module in model.modules() if not hasattr(module, "products") for own in module._parameters.values()}


def check_own_parameter(what: str, layer: torch.nn.Module, name: str) -> None:
    """Raises NotImplementedError if a weight is no parameter of the layer, as one that hooks or parametrizations
    compute in every call."""
    if layer._parameters.get(name) is None:
        raise NotImplementedError(
            f"{what} is not a parameter of the layer: it is computed from others (pruned, weight_norm, parametrized), "
            "or a plain tensor; remove what computes it before the layer is sharded "
            "(torch.nn.utils.prune.remove, torch.nn.utils.parametrize.remove_parametrizations)"
        )


def local(t: torch.Tensor | None, gradients: "Placements | None" = None) -> torch.Tensor | None:
    """This rank's shard of a DTensor; another tensor itself. gradients: placements of the part's gradient, if not
    those of t."""
    return t.to_local(grad_placements=gradients) if is_dtensor(t) else t


def placed_like(t: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor of t's kind, sizes and placements, of which this rank has that part."""
    if not is_dtensor(t):
        return part
    return DTensor.from_local(part, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())


def part_for(t: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Of a whole tensor that every rank has, a DTensor with t's placements. Nothing is sent."""
    return distributed.tensor.distribute_tensor(whole, t.device_mesh, t.placements, src_data_rank=None)


def sharding_of(weight: torch.Tensor, what: str) -> Parallel | None:
    """How a weight [out_features, in_features] is sharded, by its placement on the last dimension of its mesh. None for
    a tensor that is no DTensor, or one that all ranks have whole. Raises ValueError for other placements, and if
    parts are not equal."""
    if not is_dtensor(weight) or weight.placements[-1].is_replicate():
        return None
    placement, mesh = weight.placements[-1], weight.device_mesh
    if not isinstance(placement, Shard) or weight.dim() != 2:
        raise ValueError(
            f"{what}: a weight is sharded over ranks as Shard(0), by outputs, or as Shard(1), by inputs; got "
            f"{weight.placements} for a weight {list(weight.shape)}"
        )
    parallel = Parallel("column" if placement.dim == 0 else "row", mesh.get_group(mesh.ndim - 1))
    parallel.sizes(what, weight.shape[1], weight.shape[0])
    return parallel


class Layout(NamedTuple):
    """How tensors of one call are sharded over the ranks of a mesh.

    x, y: placements of the input that the layer computes from, and of the result. sequence: whether tokens are sharded
    along the first dimension (Parallel); None: as the layer says. gradients: placements of the gradients of parameters
    that all ranks have whole, if not those of the parameters.
    """

    mesh: "DeviceMesh"
    x: "Placements"
    y: "Placements"
    sequence: bool | None = None
    gradients: "Placements | None" = None

    def take(self, x: "DTensor") -> torch.Tensor:
        """This rank's shard of x. Sends what it needs of others, in x's dtype."""
        if x.placements != self.x:
            x = x.redistribute(placements=self.x)
        return x.to_local()

    def give(self, y: torch.Tensor, given: "DTensor") -> "DTensor":
        """The result of which this rank computed the part y. given: the call's x."""
        return self._whole(y, self.y, given)

    def give_normed(self, normed: torch.Tensor, given: "DTensor") -> "DTensor":
        """give() of a tensor that is sharded as x is."""
        return self._whole(normed, self.x, given)

    def _whole(self, part: torch.Tensor, placements: "Placements", given: "DTensor") -> "DTensor":
        if self.sequence is not None:  # then all parts are equal
            return DTensor.from_local(part, self.mesh, placements, run_check=False)
        shape = torch.Size((*given.shape[:-1], part.shape[-1]))
        strides = torch.empty(shape, dtype=part.dtype, device="meta").stride()
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=shape, stride=strides)


def layout_of_tokens(
    x: "DTensor", parameters: Iterable[tuple[str, torch.Tensor | None]], what: str, features: int = 1
) -> Layout:
    """Of a call whose parameters all ranks have whole. features: the number of last dimensions that are needed
    whole. Gradients of parameters are partial sums where tokens are sharded. Raises TypeError if a named parameter is a
    plain tensor, ValueError if it is on another mesh, NotImplementedError if it is sharded."""
    for name, parameter in parameters:
        if parameter is not None:
            _check_mesh(x, name, parameter, what)
            if not all([p.is_replicate() for p in parameter.placements]):
                refuse_placements(what, name, parameter)
    tokens = tuple([p if isinstance(p, Shard) and p.dim < x.dim() - features else Replicate() for p in x.placements])
    gradients = tuple([Partial() if p.is_shard() else Replicate() for p in tokens])
    return Layout(x.device_mesh, tokens, tokens, gradients=gradients)


def layout_of_features(
    x: "DTensor", parameters: Iterable[tuple[str, torch.Tensor | None]], what: str, first: Parallel, last: Parallel
) -> Layout:
    """Of a call of matmuls that are sharded over ranks. first, last: how the weights of the first one and of the
    last one are. Raises TypeError if a named parameter is a plain tensor, ValueError if it is on another mesh."""
    for name, parameter in parameters:
        if parameter is not None:
            _check_mesh(x, name, parameter, what)
    divisible = x.dim() > 1 and x.shape[0] % first.size == 0
    features, whole, tokens = (Shard(x.dim() - 1),), (Replicate(),), (Shard(0),)
    sequence = divisible and (x.placements == tokens if first.mode == "column" else first.sequence)
    outside = tokens if sequence else whole
    return Layout(
        x.device_mesh,
        outside if first.mode == "column" else features,
        features if last.mode == "column" else outside,
        sequence,
    )


def placed_for(x: "DTensor", parallel: Parallel) -> "DTensor":
    """x with all tokens on every rank, and the features that its part of the weight needs."""
    wanted = (Replicate() if parallel.mode == "column" else Shard(x.dim() - 1),)
    return x if x.placements == wanted else x.redistribute(placements=wanted)


def _check_mesh(x: "DTensor", name: str, parameter: torch.Tensor, what: str) -> None:
    if not is_dtensor(parameter):
        raise TypeError(
            f"{what}: x is a DTensor and {name} is a plain tensor; shard the layer with "
            "torch.distributed.tensor.parallel.parallelize_module, or pass x.to_local()"
        )
    if x.device_mesh != parameter.device_mesh:
        raise ValueError(
            f"{what}: x and {name} must be on one device mesh, got {x.device_mesh} and {parameter.device_mesh}"
        )


def refuse_placements(what: str, name: str, t: "DTensor") -> None:
    """Raises NotImplementedError for a parameter that is sharded as no layer computes from it."""
    raise NotImplementedError(
        f"{what}: {name} is a DTensor with {t.placements}, and this call cannot compute from it. Use "
        "DistributedDataParallel or fully_shard, or shard the layer with "
        "torch.distributed.tensor.parallel.parallelize_module, and pass an x that its style accepts"
    )


# ------------------------------------------------------------ calls of quire's layers


def check_parameters(
    module: torch.nn.Module, x: torch.Tensor, parameters: Iterable[tuple[str, torch.Tensor | None]]
) -> None:
    """Raises NotImplementedError for a DTensor, x or a named parameter, of which a layer does not take this rank's
    shard."""
    sharded = module.expert_group is not None or module.of(module.products[0], "parallel") is not None
    for name, tensor in (("x", x), *(() if sharded else parameters)):
        if is_dtensor(tensor) and (module.shards is None or name not in module.shards):
            refuse_placements(f"quire.{type(module).__name__}", name, tensor)


def layout_of(module: torch.nn.Module, x: torch.Tensor) -> Layout | None:
    """How the tensors of a call with a DTensor x are sharded; None for another x."""
    if not is_dtensor(x):
        return None
    what, parameters = f"quire.{type(module).__name__}", list(module._parameters.items())
    if module.shards is not None:
        raise NotImplementedError(
            f"{what}: its weights are sharded by shard_weights, and x must be a plain tensor of this rank's tokens, "
            "got a DTensor; pass x.to_local()"
        )
    each = [module.of(product, "parallel") for product in module.products]
    if None in each:
        return layout_of_tokens(x, parameters, what)
    return layout_of_features(x, parameters, what, each[0], each[-1])


def torchs_result(
    layer: torch.nn.Linear, x: "DTensor"
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None] | None:
    """The result of a call without a recipe that PyTorch computes as for a torch.nn.Linear, for all placements and
    dtypes that it supports. None for other calls."""
    if layer.external_wgrad or layer.shards is not None:
        return None
    if layer.parallel is not None:
        if layer.parallel.sequence or one_process.enabled():
            return None
        x = placed_for(x, layer.parallel)
    y = torch.nn.functional.linear(x, layer.weight, None if layer.return_bias else layer.bias)
    return (y, layer.bias) if layer.return_bias else y
