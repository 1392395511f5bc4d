"""Inputs that are quantized with a scale of the layer, `input_scale`, instead of a measured one (numerics.md 2.5, 5.9).

The scale is a buffer of the module: float32, one for each group of tokens, NaN until it is loaded.
"""

from __future__ import annotations

import torch

from quire.distributed.placements import local
from quire.functional import Buffers
from quire.nn.product_module import ProductModule, named
from quire.tensor import QuantizedActivation, QuantizedTensor


def is_quantized(x: torch.Tensor | QuantizedActivation, given: Buffers) -> bool:
    """Whether x is quantized already, by itself or by what made it."""
    return bool(given) or isinstance(x, QuantizedTensor | QuantizedActivation)


def static_scale(module: ProductModule, product: str, text: str, *, needs_dw: bool) -> torch.Tensor:
    """The scale of a matmul's input. text: of its recipe. Raises RuntimeError if the layer has no scale,
    NotImplementedError for what does not go with one."""
    what, name, spec = f"quire.{type(module).__name__}", named(product, "input_scale"), text.split(",")[0]
    scale = module._buffers.get(name)
    if scale is None:
        raise RuntimeError(
            f"{what}: {spec} has its scale from the layer, which has no buffer {name!r}; give the layer its recipe "
            "(recipe= of its constructor, or quire.convert), and load its state dict"
        )
    module.check_float32(what, name)
    if needs_dw and text.endswith(("backward=high_precision", "backward=requantized")):
        raise NotImplementedError(
            f"{what}: the gradient of its weight starts from x itself ({text.rsplit(',', 1)[1]}), and {spec} is "
            "quantized before; take backward_override='dequantized' or None, without save_original_input"
        )
    return local(scale)  # parallelize_module makes buffers DTensors, which all processes have whole
