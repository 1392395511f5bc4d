"""Activations whose backward pass computes from codes of their input (cache_quantized_input), which need a quarter or a
half of the memory."""

from typing import Any

import torch

from quire.functional import activation, activation_gradient, quantize

#: What TransformerEngine caches an input as.
_SPEC = "fp8_tensor"


class ActivationOfCodes(torch.autograd.Function):
    """quire.functional.activation()[0] of x, name and dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        ctx.name = name
        ctx.save_for_backward(quantize(x.detach(), _SPEC))
        return activation(x.detach(), name, dtype)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (codes,) = ctx.saved_tensors
        return activation_gradient(dy, codes.dequantize(), ctx.name), None, None


def soft_caps(x: torch.Tensor, beta1: float, beta2: float, dtype: torch.dtype) -> torch.Tensor:
    """te.ops.SiTUGLU."""
    gate, linear = x.float().chunk(2, -1)
    gate = beta1 * torch.tanh(gate / beta1) * torch.sigmoid(gate)
    return (gate * beta2 * torch.tanh(linear / beta2)).to(dtype)


class SoftCapsOfCodes(torch.autograd.Function):
    """soft_caps()."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beta1: float, beta2: float, dtype: torch.dtype) -> torch.Tensor:
        ctx.betas = beta1, beta2
        ctx.save_for_backward(quantize(x.detach(), _SPEC))
        return soft_caps(x.detach(), beta1, beta2, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (codes,), (beta1, beta2) = ctx.saved_tensors, ctx.betas
        gate, linear = codes.dequantize(torch.float32).chunk(2, -1)
        dy, sigmoid = dy.float(), torch.sigmoid(gate)
        of_gate, of_linear = torch.tanh(gate / beta1), torch.tanh(linear / beta2)
        slope = (1 - of_gate.square()) * sigmoid + beta1 * of_gate * sigmoid * (1 - sigmoid)
        dgate = dy * beta2 * of_linear * slope
        dlinear = dy * beta1 * of_gate * sigmoid * (1 - of_linear.square())
        return torch.cat([dgate, dlinear], -1).to(codes.dtype), None, None, None
