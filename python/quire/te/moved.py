"""Modules by other names: those that pickles of before have for them, which name a class by its module, and
TransformerEngine's, which scripts import from."""

import sys
from types import ModuleType

from quire.conversion import report
from quire.te import (
    attention,
    moe_padding,
    moe_permutation,
    moe_router,
    names,
    ops,
    pytorch,
    quantization,
    quantizer_factories,
    quantizers,
    split,
    tensors,
)
from quire.te.attention import dot_product_attention, key_value_cache, multi_head_attention, rope, transformer_layer
from quire.te.common import recipe

_MOVED: dict[str, ModuleType] = {
    "quire.convert": report,
    "quire.drop_in": names,
    "quire.moe.te_padding": moe_padding,
    "quire.moe.te_router": moe_router,
    "quire.nn.split": split,
    "quire.quantizer": quantizers,
    "quire.tensor.names": tensors,
    "quire.te.pytorch.attention": attention,
    "quire.te.pytorch.attention.dot_product_attention": dot_product_attention,
    "quire.te.pytorch.attention.inference": key_value_cache,
    "quire.te.pytorch.attention.multi_head_attention": multi_head_attention,
    "quire.te.pytorch.attention.rope": rope,
    "quire.te.pytorch.custom_recipes": quantizer_factories,
    "quire.te.pytorch.custom_recipes.quantizer_factories": quantizer_factories,
    "quire.te.pytorch.fp8": quantization,
    "quire.te.pytorch.ops": ops,
    "quire.te.pytorch.permutation": moe_permutation,
    "quire.te.pytorch.quantization": quantization,
    "quire.te.pytorch.router": moe_router,
    "quire.te.pytorch.transformer": transformer_layer,
    "quire.te.recipe": recipe,
    # Of these, every name that is here is also one of the package.
    "quire.te.pytorch.distributed": pytorch,
    "quire.te.pytorch.float8_tensor": pytorch,
    "quire.te.pytorch.module": pytorch,
    "quire.te.pytorch.quantized_tensor": pytorch,
    "quire.te.pytorch.tensor": pytorch,
    "quire.te.pytorch.tensor.float8_blockwise_tensor": pytorch,
    "quire.te.pytorch.tensor.float8_tensor": pytorch,
    "quire.te.pytorch.tensor.mxfp8_tensor": pytorch,
    "quire.te.pytorch.tensor.nvfp4_tensor": pytorch,
}


def register_moved() -> None:
    """Has the modules found under their other names too."""
    for name, module in _MOVED.items():
        parent, _, last = name.rpartition(".")
        sys.modules[name] = module
        if last != "convert":  # which is a function now
            setattr(sys.modules[parent], last, module)
