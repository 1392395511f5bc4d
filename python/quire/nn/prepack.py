"""The order of weight codes in memory that matmuls with few tokens read fastest."""

import torch

from quire.checks import check_type
from quire.nn.product_module import ProductModule
from quire.tensor import QuantizedTensor
from quire.tensor.order import reordered


@torch.no_grad()
def prepack_weights(model: torch.nn.Module) -> None:
    """Replaces the codes of the model's quantized weights by interleaved codes (numerics.md 2.4).

    Use it for inference with few tokens at a time on a CPU. Matmuls with interleaved weights need no transpose in each
    call. They give the same bits there and are faster. On CUDA devices plain codes are faster: call unpack_weights()
    for a model that was converted on a CPU. The parameters stay the same objects. `weight.spec` then ends with
    "interleaved", in a state dict too. Tensors of either order load into parameters of either order. unpack_weights()
    restores the previous bytes.

    The weights must be quantized parameters (quire.quantized_model_init). The codes of quire.quantize_weights are
    already interleaved.

    Args:
        model: the model. It changes in place.

    Raises:
        ValueError: if the model has no quantized parameters.
        RuntimeError: for swizzled scales; the model is then unchanged. Not available within a compiled function.
    """
    _reorder("prepack_weights", model, interleaved=True)


@torch.no_grad()
def unpack_weights(model: torch.nn.Module) -> None:
    """Reverses prepack_weights(): the codes get the plain order again, with the same bytes. Raises the same errors.

    Args:
        model: the model. It changes in place.
    """
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
