"""What all operations of a Sequential have in common."""

import torch

from quire.nn.dtype import uses_torch_autocast
from quire.te.ops.channels import Channels
from quire.tensor import QuantizedActivation, QuantizedTensor

#: What an operation takes: Quantize gives quantized ones.
Input = torch.Tensor | QuantizedActivation


class Operation(Channels, torch.nn.Module):
    """A module that a Sequential gives further tensors to, and takes further ones from. TransformerEngine's
    FusibleOperation.

    num_extra_inputs: how many tensors forward takes after the first. num_extra_outputs: how many it returns after the
    first, in a tuple. is_fused_op: whether it is a FusedOperation.
    """

    is_fused_op = False


def plain(x: Input) -> torch.Tensor:
    """x in high precision."""
    return x.dequantize() if isinstance(x, QuantizedActivation | QuantizedTensor) else x


def in_dtype_of(x: Input, weight: torch.Tensor) -> Input:
    """A plain x in the dtype of a layer's weight; torch.autocast, where it is enabled, decides instead."""
    if isinstance(x, QuantizedActivation | QuantizedTensor) or x.dtype == weight.dtype or uses_torch_autocast(x):
        return x
    return x.to(weight.dtype)
