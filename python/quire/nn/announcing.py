"""What a matmul of a layer that is sharded over ranks says to the other ranks, before its first collective."""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.distributed import check_ranks
from quire.distributed.check_ranks import Fields
from quire.distributed.groups import the_group
from quire.distributed.parallel import Parallel
from quire.distributed.sharded_product import Plan
from quire.nn.call import Call
from quire.nn.layer_path import path_of


class Announced(Protocol):
    """What ranks say of a Product (quire.nn.product)."""

    module: torch.nn.Module
    name: str
    call: Call
    text: str
    weights: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor]
    input_scale: torch.Tensor | None


def announce(product: Announced, x: torch.Tensor, parallel: Parallel) -> str:
    """Which layer calls collectives, for their errors. Says to the other ranks what is to be computed: with
    QUIRE_CHECK_RANKS=1 all of it in each call, and otherwise what sizes follow from, where it has changed."""
    module, weight = product.module, product.weights[0]
    layer = _named(product)
    caller = parallel.caller(layer)
    recipe = product.text if product.call.recipe is not None else "none"

    def said() -> Fields:
        fields: Fields = {"layer": layer, "sharded as": parallel.text, "tokens": x.shape[:-1].numel()}
        fields |= {"x": f"{x.dtype} [*, {x.shape[-1]}]", "weight": f"{weight.dtype} {list(weight.shape)}"}
        return fields | check_ranks.fields_of_recipe(recipe)

    if not check_ranks.enabled():
        parallel.agree(module, product.name, (x, weight, recipe), lambda: (caller, said()))
        return caller
    fields = said() | {"x": f"{x.dtype} {list(x.shape)}"}
    if product.input_scale is not None:
        fields["input_scale"] = str(product.input_scale.tolist())
    fields["gradient"] = "yes" if torch.is_grad_enabled() else "no"
    parallel.check_ranks(caller, fields | check_ranks.drawn(product.parameters[0]))
    return caller


def agree_on_shards(product: Announced, plan: Plan) -> None:
    """Raises RuntimeError if the ranks would gather parts of different sizes of a weight of shard_weights."""
    layer, weight = _named(product), product.weights[0]

    def said() -> tuple[str, Fields]:
        fields: Fields = {"layer": layer, "shard of the weight": f"{weight.dtype} {list(weight.shape)}"}
        return layer, fields | check_ranks.fields_of_recipe(plan.text or "none")

    sizes = (weight.dtype, weight.shape, plan.text)
    check_ranks.agree(product.module, product.name, sizes, said, the_group(plan.group), device=weight.device)


def _named(product: Announced) -> str:
    path = ".".join(filter(None, (path_of(product.module), product.name)))
    layer = f"quire.{type(product.module).__name__}"
    return f"{layer} {path!r}" if path else layer
