"""Weights in the order in which products read them soonest."""

import torch

from quire.checks import check_type
from quire.nn.product_module import ProductModule
from quire.tensor import QuantizedTensor
from quire.tensor.order import reordered


@torch.no_grad()
def prepack_weights(model: torch.nn.Module) -> None:
    """Interleaves the codes of the model's quantized weights (numerics.md 2.4), in place of the plain ones.

    For inference with few tokens at a time: products of weights that need not be turned in every call have the same
    bits, sooner. The parameters stay the same objects, and `weight.spec` then ends with "interleaved", in a state dict
    too; tensors of either order load into parameters of either. unpack_weights() undoes it, byte for byte.

    Weights are quantized parameters (quire.quantized_model_init); the codes that quire.quantize_weights keeps are
    interleaved already. Raises ValueError if the model has none, RuntimeError for swizzled scales; the model is then as
    it was. Not within a compiled function.
    """
    _reorder("prepack_weights", model, interleaved=True)


@torch.no_grad()
def unpack_weights(model: torch.nn.Module) -> None:
    """Undoes prepack_weights(): codes are in plain order again, in the same bytes. Raises as that does."""
    _reorder("unpack_weights", model, interleaved=False)


def _reorder(what: str, model: torch.nn.Module, interleaved: bool) -> None:
    check_type(what, torch.nn.Module, model=model)
    found = [
        weight
        for module in model.modules()
        if isinstance(module, ProductModule)
        for product in module.products
        for weight in module.weights(product).values()
        if isinstance(weight, QuantizedTensor)
    ]
    if not found:
        raise ValueError(
            f"{what}: {type(model).__name__} has no quantized weights; make the model within "
            "quire.quantized_model_init, or call quire.quantize_weights, whose codes are interleaved already"
        )
    # Tied weights are one; and all are made before any is changed.
    made = {id(weight): (weight, reordered(weight.detach(), interleaved)) for weight in found}
    for weight, tensor in made.values():
        weight.data = tensor
