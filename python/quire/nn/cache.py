"""Weights quantized once for several forward passes: the codes, and the proof that they are still the weight's."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire import delayed
from quire.autocast import recipe_of
from quire.checks import check_type, check_type_or_none
from quire.functional import Buffers, fingerprint, operand_buffers
from quire.nn.product_module import ProductModule, named
from quire.recipe import Recipe, as_recipe, default
from quire.tensor import QuantizedTensor, QuantSpec
from quire.tensor.order import in_order


class CachedWeight(NamedTuple):
    """Codes of a product's weight, or of the weights of its groups, in both directions.

    spec, stored: texts, of the recipe's spec for w, and of that with the order that codes are in. buffers: six; of
    groups flat ones, group after group. rowwise: the same without columnwise ones. fingerprint: int64 [weights], of
    each when it was quantized; a product refuses codes when it differs, so that no write to a weight, by whichever way,
    can leave stale codes in use.
    """

    spec: str
    stored: str
    buffers: tuple[torch.Tensor | None, ...]
    rowwise: tuple[torch.Tensor | None, ...]
    fingerprint: torch.Tensor

    @classmethod
    def of(cls, spec: str, stored: str, buffers: tuple[torch.Tensor, ...], fingerprint: torch.Tensor) -> "CachedWeight":
        return cls(spec, stored, buffers, (*buffers[:3], None, None, None), fingerprint)

    def operand(self) -> Buffers:
        """The buffers that a product needs now: both directions only if there may be a backward pass."""
        return self.buffers if torch.is_grad_enabled() else self.rowwise


def cache(
    weights: Sequence[torch.Tensor], recipe: Recipe, scale: torch.Tensor | None, *, interleaved: bool = False
) -> CachedWeight:
    """Quantizes the weight of a product, or that of each of its groups. scale: the state's forward scales under delayed
    scaling (numerics.md 1.5)."""
    stored = in_order(recipe.weight_spec, interleaved)
    each: list[list[torch.Tensor]] = []
    for group, weight in enumerate(weights):
        w = weight.detach()
        if scale is not None:
            each.append(delayed.quantize(w, scale, len(weights) + group, True, stored))
        else:
            each.append(operand_buffers(w, stored, True))
    marks = [fingerprint(weight.detach()) for weight in weights]
    if len(each) == 1:
        return CachedWeight.of(recipe.weight_spec, stored, tuple(each[0]), marks[0])
    # One list of six, however many groups: a call costs the host no more when there are more.
    buffers = tuple([torch.cat([one.flatten() for one in same]) for same in zip(*each, strict=True)])
    return CachedWeight.of(recipe.weight_spec, stored, buffers, torch.cat(marks))


def cached_weight(
    module: ProductModule, product: str, recipe: Recipe, is_first_microbatch: bool | None
) -> CachedWeight | None:
    """The codes that a forward pass uses, if there are any for it: microbatch_weight, of the first microbatch, where
    is_first_microbatch is False; kept_weight, of quantize_weights(), where it is None."""
    # A first microbatch reads neither, so that its graph does not depend on whether there are any.
    if is_first_microbatch is True:
        return None
    found = module.of(product, "kept_weight" if is_first_microbatch is None else "microbatch_weight")
    return found if found is not None and found.spec == recipe.weight_spec else None


def quantize_weights(
    model: torch.nn.Module, recipe: Recipe | str | None = None, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Quantizes the weights of the products of the model's layers and keeps the codes for all forward passes that
    follow.

    recipe: the one that layers will run under; None is what each would run under now, else quire.recipe.default().
    Under recipes with another spec for w the codes are not used.
    optimizer: after each of its steps the weights are quantized again. Without one, call this again after each change
    of the weights.

    Codes are kept interleaved, which products of few tokens read soonest (numerics.md 2.4).

    A forward pass after a weight has changed in any other way (load_state_dict, .data, an optimizer that was not given)
    raises RuntimeError until this is called again: it compares the weight with a fingerprint. Weights that are
    quantized parameters are left alone. Moving or converting the model drops the codes. Not within a compiled function.
    """
    check_type("quantize_weights", torch.nn.Module, model=model)
    check_type_or_none("quantize_weights", torch.optim.Optimizer, optimizer=optimizer)
    recipe = as_recipe("quantize_weights", recipe)
    chosen = [
        (module, product, recipe or recipe_of(module.recipe) or default())
        for module in model.modules()
        if isinstance(module, ProductModule)
        for product in module.products
    ]

    @torch.no_grad()
    def quantize(*_: object) -> None:
        for each in chosen:
            _keep(*each)

    quantize()
    if optimizer is not None:
        optimizer.register_step_post_hook(quantize)


def _keep(module: ProductModule, product: str, recipe: Recipe) -> None:
    weights, state = module.group_weights(product), module.of(product, "delayed")
    if isinstance(weights[0], QuantizedTensor):
        return
    interleaved = "swizzled" not in QuantSpec(recipe.weight_spec).options  # these scales have an order of their own
    made = cache(weights, recipe, state.fwd_scale if recipe.delayed() else None, interleaved=interleaved)
    setattr(module, named(product, "kept_weight"), made)
    if recipe.delayed():
        delayed.collect_weight(state, made.buffers[2])
