"""What becomes of a model's quantized weights: another order of their codes, or plain parameters again."""

import torch

from quire.checks import check_type, check_type_or_none
from quire.nn.product_module import ProductModule
from quire.nn.stacked_experts import StackedExperts
from quire.tensor import DTYPES, QuantizedTensor
from quire.tensor.order import reordered


@torch.no_grad()
def prepack_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Replaces the codes of the model's quantized weights by interleaved codes (numerics.md 2.4). Returns the model.

    Use it for inference with few tokens at a time on a CPU. Matmuls with interleaved weights need no transpose in each
    call. They give the same bits there and are faster. On CUDA devices plain codes are faster: call unpack_weights()
    for a model that was converted on a CPU. The parameters stay the same objects. `weight.spec` then ends with
    "interleaved", in a state dict too. Tensors of either order load into parameters of either order. unpack_weights()
    restores the previous bytes.

    The weights must be quantized parameters (of quire.quantized_model_init, quire.convert(for_inference=True) or
    quire.io.load). The codes of quire.quantize_weights are
    already interleaved.

    Args:
        model: the model. It changes in place.

    Returns:
        The model.

    Raises:
        ValueError: if the model has no quantized parameters.
        RuntimeError: for swizzled scales; the model is then unchanged. Not available within a compiled function.
    """
    return _reorder("prepack_weights", model, interleaved=True)


@torch.no_grad()
def unpack_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Reverses prepack_weights(): the codes get the plain order again, with the same bytes. Returns the model. Raises
    the same errors.

    Args:
        model: the model. It changes in place.

    Returns:
        The model.
    """
    return _reorder("unpack_weights", model, interleaved=False)


def _reorder(what: str, model: torch.nn.Module, interleaved: bool) -> torch.nn.Module:
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
    return model


@torch.no_grad()
def dequantize_weights(model: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Replaces the model's quantized weights by plain parameters with the decoded values, in place, and returns the
    model. It reverses quire.convert(..., for_inference=True), but not the rounding: the values are those of the codes.

    The layers lose their own recipe and static scales, and compute in high precision. Layers that shared a weight
    still share it. A new parameter requires a gradient if the quantized one did. Parameters are new objects, so make
    optimizers afterwards. Use it before a low-rank adapter is merged, and to save the model for tools that do not read
    quantized weights.

    Args:
        model: a model with quantized weights. It changes in place.
        dtype: float32, float16 or bfloat16; None is the nominal dtype of each weight, which the model had before.

    Returns:
        The model.

    Raises:
        ValueError: if the model has no quantized weights, for another dtype, and for a model that transformers has
            loaded with quantized weights: its own method model.dequantize() also changes its configuration. The model
            is then unchanged.
    """
    check_type("dequantize_weights", torch.nn.Module, model=model)
    check_type_or_none("dequantize_weights", torch.dtype, dtype=dtype)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dequantize_weights: dtype must be float32, float16 or bfloat16, got {dtype}")
    if any(vars(module).get("hf_quantizer") is not None for module in model.modules()):
        raise ValueError(
            f"dequantize_weights: transformers has loaded this {type(model).__name__} with quantized weights, and its "
            "configuration says so; call model.dequantize(), which changes both"
        )
    if not decode_weights(model, dtype):
        raise ValueError(
            f"dequantize_weights: {type(model).__name__} has no quantized weights; its parameters are plain already"
        )
    return model


def decode_weights(model: torch.nn.Module, dtype: torch.dtype | None) -> list[torch.nn.Parameter]:
    """What dequantize_weights() does; the new parameters, none if no weight is quantized."""
    found = {
        module: [name for name in module.weight_names if isinstance(getattr(module, name), QuantizedTensor)]
        for module in model.modules()
        if isinstance(module, ProductModule)
    }
    made: dict[int, torch.nn.Parameter] = {}
    replaced = []  # keeps the old parameters, and so their ids
    for module, names in found.items():
        for name in names:
            weight = getattr(module, name)
            replaced.append(weight)
            if id(weight) not in made:
                values = weight.detach().dequantize(dtype)
                values = module.as_stored(values) if isinstance(module, StackedExperts) else values
                made[id(weight)] = torch.nn.Parameter(values, requires_grad=weight.requires_grad)
            setattr(module, name, made[id(weight)])
        if names:
            module.recipe = None
            module.add_input_scales()
            module._forget_weights()
    return list(made.values())
