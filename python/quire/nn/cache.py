"""Weights that are quantized once for several forward passes: the codes, and a check that they are not stale."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from quire import delayed
from quire.autocast import recipe_of
from quire.checks import check_type, check_type_or_none
from quire.distributed.parallel import Parallel
from quire.distributed.placements import is_dtensor
from quire.functional import Buffers, fingerprint, operand_buffers
from quire.loading.deferred import mark_static
from quire.loading.devices import reads_interleaved
from quire.nn.product_module import ProductModule, named
from quire.nn.weight import compute_weights_as_in_evaluation
from quire.recipe import Recipe, as_recipe, default
from quire.tensor import QuantizedTensor, QuantSpec
from quire.tensor.order import in_order

#: Optimizer -> model -> the hook that quantizes the weights after each step, of which there is one.
_HOOKS: weakref.WeakKeyDictionary[
    torch.optim.Optimizer, weakref.WeakKeyDictionary[torch.nn.Module, RemovableHandle]
] = weakref.WeakKeyDictionary()


class CachedWeight(NamedTuple):
    """Codes of the weight of a matmul, or of the weights of its groups, in both directions.

    spec, stored: texts; the recipe's spec for w, and the same spec with the order in which the codes are stored.
    buffers: the six buffers; for groups flat buffers, group after group. rowwise: the same buffers without the
    columnwise ones and without an amax that scales nothing. fingerprint: int64 [weights], of each weight when it was
    quantized. A matmul refuses the codes if the fingerprint differs, so no kind of write to a weight can leave stale
    codes in use.
    """

    spec: str
    stored: str
    buffers: tuple[torch.Tensor | None, ...]
    rowwise: tuple[torch.Tensor | None, ...]
    fingerprint: torch.Tensor

    @classmethod
    def of(cls, spec: str, stored: str, buffers: tuple[torch.Tensor, ...], fingerprint: torch.Tensor) -> "CachedWeight":
        # A graph has no input that it does not need. Flat buffers of several weights are passed whole.
        amax = buffers[2] if QuantSpec(spec).scaled_by_amax or len(fingerprint) > 1 else None
        return cls(spec, stored, buffers, (*buffers[:2], amax, None, None, None), fingerprint)

    def operand(self) -> Buffers:
        """The buffers that a matmul needs now: both directions only if there may be a backward pass."""
        return self.buffers if torch.is_grad_enabled() else self.rowwise


def cache(
    weights: Sequence[torch.Tensor],
    recipe: Recipe,
    scale: torch.Tensor | None,
    *,
    interleaved: bool = False,
    parallel: Parallel | None = None,
) -> CachedWeight:
    """Quantizes the weight of a matmul, or the weights of its groups. scale: the state's forward scales under delayed
    scaling (numerics.md 1.5). parallel: how the weight is sharded over ranks."""
    stored = in_order(recipe.weight_spec, interleaved)
    each: list[list[torch.Tensor]] = []
    for group, weight in enumerate(weights):
        w = weight.detach()
        if scale is not None:
            each.append(list(delayed.quantize(w, scale, len(weights) + group, True, stored)))
            if parallel is not None:
                each[-1][2] = parallel.reduced(each[-1][2])
        else:
            each.append(operand_buffers(w, stored, True, "" if parallel is None else parallel.text))
    marks = [fingerprint(weight.detach()) for weight in weights]
    if len(each) == 1:
        return CachedWeight.of(recipe.weight_spec, stored, tuple(each[0]), marks[0])
    # One list of six, however many groups: a call costs the host no more when there are more.
    buffers = tuple([torch.cat([one.flatten() for one in same]) for same in zip(*each, strict=True)])
    return CachedWeight.of(recipe.weight_spec, stored, buffers, torch.cat(marks))


def quantize_weights(
    model: torch.nn.Module, recipe: Recipe | str | None = None, optimizer: torch.optim.Optimizer | None = None
) -> torch.nn.Module:
    """Quantizes the weights of the model's layers, keeps the codes for all later forward passes, and returns the model.

    The codes are stored in the order that matmuls of few tokens read fastest: interleaved (numerics.md 2.4), and on
    CUDA devices plain.

    If a weight has changed otherwise than by the given optimizer (load_state_dict, .data), a forward pass raises
    RuntimeError until this function is called again: the forward pass compares the weight with a fingerprint. Weights
    that are quantized parameters are skipped. Moving or converting the model deletes the codes. Not available within a
    compiled function.

    Args:
        model: a model with layers of quire.
        recipe: the recipe under which the layers will run. None: the recipe under which each layer would run now, else
            quire.recipe.default(). Under a recipe with another spec for w the codes are not used.
        optimizer: after each of its steps the weights are quantized again. Without an optimizer, call this function
            again after each change of the weights.

    Returns:
        The model.

    Raises:
        ValueError: if the model has no layers of quire.
        NotImplementedError: for weights that fully_shard has sharded.
    """
    check_type("quantize_weights", torch.nn.Module, model=model)
    check_type_or_none("quantize_weights", torch.optim.Optimizer, optimizer=optimizer)
    recipe = as_recipe("quantize_weights", recipe)
    chosen = [
        (module, product, (None if found is None else found.of_product(product)) or default())
        for module in model.modules()
        if isinstance(module, ProductModule)
        for found in (recipe or recipe_of(module),)
        for product in module.products
    ]
    if not chosen:
        raise ValueError(
            f"quantize_weights: nothing to quantize: {type(model).__name__} has no layer of quire; call quire.convert "
            "first, and pass the model that it returns"
        )
    for module, product, _ in chosen:
        _check_whole(module, product)

    # Codes that are made in inference mode could not be saved for backward.
    @torch.inference_mode(False)
    @torch.no_grad()
    def quantize(*_: object) -> None:
        for module in {module for module, *_ in chosen}:
            compute_weights_as_in_evaluation(module)
        for each in chosen:
            _keep(*each)

    quantize()
    if optimizer is not None:
        hooks = _HOOKS.setdefault(optimizer, weakref.WeakKeyDictionary())
        if model in hooks:
            hooks[model].remove()
        hooks[model] = optimizer.register_step_post_hook(quantize)
    return model


def _check_whole(module: ProductModule, product: str) -> None:
    for name, weight in module.weights(product).items():
        if is_dtensor(weight) and module.of(product, "parallel") is None:
            raise NotImplementedError(
                f"quantize_weights: {name} of a quire.{type(module).__name__} is a DTensor with {weight.placements}, "
                "and outside of a forward pass this rank has a part of it; quantize the weights that fully_shard "
                "gathers with quire.distributed.gather_codes, or pass is_first_microbatch to the layer"
            )


def _keep(module: ProductModule, product: str, recipe: Recipe) -> None:
    weights, state = module.group_weights(product), module.of(product, "delayed")
    if isinstance(weights[0], QuantizedTensor):
        return
    swizzled = "swizzled" in QuantSpec(recipe.weight_spec).options  # these scales have an order of their own
    interleaved = not swizzled and reads_interleaved(weights[0].device)
    with_scale = recipe.delayed() and "w" in recipe.delayed_operands
    scale, parallel = state.fwd_scale if with_scale else None, module.of(product, "parallel")
    made = cache(weights, recipe, scale, interleaved=interleaved, parallel=parallel)
    for buffer in (*made.buffers, made.fingerprint):
        if buffer is not None:
            mark_static(buffer)
    setattr(module, named(product, "kept_weight"), made)
    if with_scale:
        delayed.collect_weight(state, made.buffers[2])
