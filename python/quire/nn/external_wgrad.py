"""Gradients of weights that go elsewhere than to autograd (fuse_wgrad_accumulation, delay_wgrad_compute)."""

from collections.abc import Iterable

import torch

from quire.nn.call import Call
from quire.nn.product_module import ProductModule, main_grads


def external_wgrad(module: ProductModule, product: str, call: Call) -> dict[str, object]:
    """Arguments of grouped_linear() that say where the gradient of a product's weights goes, if not to autograd."""
    weights = module.weights(product)
    given: dict[str, object] = {}
    if not any([weight.requires_grad for weight in weights.values()]):
        return given
    if module.delay_wgrad_compute:
        given["wgrad_stash"] = module.of(product, "wgrad_stash")
        given["overwrite_main_grad"] = call.is_first_microbatch is True
    elif module.fuse_wgrad_accumulation:
        given["main_grad"] = main_grads(module, weights)
        overwrites = any([getattr(weight, "overwrite_main_grad", False) for weight in weights.values()])
        given["overwrite_main_grad"] = overwrites or call.is_first_microbatch is True
    if given:
        given["placeholder"] = any([hasattr(weight, "grad_added_to_main_grad") for weight in weights.values()])
    return given


def mark_added(weights: Iterable[torch.Tensor]) -> None:
    """Tells hooks that wait for a gradient of these weights that it goes elsewhere (external_wgrad)."""
    for weight in weights:
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
