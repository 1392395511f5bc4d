"""Norms as operations."""

import torch

from quire.te import layers
from quire.te.ops.operation import Input, Operation, in_dtype_of, plain


class _Norm(Operation):
    """sm_margin: a hint to CUDA kernels, of no effect."""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        options = {"device": device, "params_dtype": dtype, "zero_centered_gamma": zero_centered_gamma}
        super().__init__(normalized_shape, eps, **options)

    def forward(self, x: Input) -> torch.Tensor:
        return super().forward(in_dtype_of(plain(x), self.weight))


class LayerNorm(_Norm, layers.LayerNorm):
    """quire.LayerNorm. x is taken in the dtype of the weight."""


class RMSNorm(_Norm, layers.RMSNorm):
    """quire.RMSNorm. x is taken in the dtype of the weight."""


class L2Normalization(Operation):
    """x / sqrt(sum of x^2 + eps) over the last dimension, computed in float32, in x's dtype. seq_length,
    micro_batch_size: sizes to warm up kernels for, of no effect."""

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Input) -> torch.Tensor:
        x = plain(x)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)
