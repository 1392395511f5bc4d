"""Activations as operations (numerics.md 11.3). The first half of the input of a gated one is the gate."""

import math
from typing import Any

import torch

from quire.functional import activation, activation_gradient, activation_text, quantize
from quire.nn.layer_base import activation_dtype
from quire.nn.recompute import checkpoint
from quire.te.ops.operation import Input, Operation, plain

# --- orders of the rows or columns that a gated activation takes: the gate and then the linear part, or both in turn in
# blocks, [gate block, linear block, gate block, ...]


def _blocks(what: str, size: int, interleave_size: int) -> int:
    if interleave_size < 1 or size % (2 * interleave_size):
        raise ValueError(
            f"{what}: interleave_size must be at least 1 and the dimension a multiple of twice that, got "
            f"interleave_size={interleave_size} and a dimension of {size}"
        )
    return size // (2 * interleave_size)


def deinterleaved(tensor: torch.Tensor, interleave_size: int, dim: int) -> torch.Tensor:
    """A dimension in blocks by turns -> gate and then linear part."""
    blocks = _blocks("deinterleave_glu_tensor", tensor.shape[dim], interleave_size)
    parts = tensor.unflatten(dim, (blocks, 2, interleave_size))
    first = dim if dim >= 0 else tensor.ndim + dim
    return parts.transpose(first, first + 1).flatten(first, first + 2)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The rows of a weight or bias [2H, *] that has gate and linear part by turns, in blocks of interleave_size -> the
    gate's rows and then the linear part's. Raises ValueError unless 2H is a multiple of 2 interleave_size."""
    return deinterleaved(tensor, interleave_size, 0)


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of deinterleave_glu_tensor()."""
    blocks = _blocks("interleave_glu_tensor", tensor.shape[0], interleave_size)
    return tensor.unflatten(0, (2, blocks, interleave_size)).transpose(0, 1).flatten(0, 2)


# --- backward passes that compute from codes of the input (cache_quantized_input), which need a quarter or a half of
# the memory


#: The format in which TransformerEngine caches an input.
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
    y = gate * beta2 * torch.tanh(linear / beta2)
    return y if y.dtype == dtype else y.to(dtype)  # for SoftCapsOfCodes, as one_process._moved() explains


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


# --- the operations


class _Activation(Operation):
    """cache_quantized_input: backward computes from codes of the input with one FP8 scale, instead of the input."""

    name: str

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input
        self._text = self._named()

    def _named(self) -> str:
        return activation_text(f"te.ops.{type(self).__name__}", self.name, None)

    def forward(self, x: Input) -> torch.Tensor:
        x = plain(x)
        if self.cache_quantized_input and torch.is_grad_enabled() and x.requires_grad:
            return ActivationOfCodes.apply(x, self._text, activation_dtype(x))
        return activation(x, self._text, activation_dtype(x))[0]


class GELU(_Activation):
    """The tanh form of GELU."""

    name = "gelu"


class GLU(_Activation):
    name = "glu"


class GEGLU(_Activation):
    name = "geglu"


class QGELU(_Activation):
    name = "qgelu"


class QGEGLU(_Activation):
    name = "qgeglu"


class ReLU(_Activation):
    name = "relu"


class ReGLU(_Activation):
    name = "reglu"


class SReLU(_Activation):
    name = "srelu"


class SReGLU(_Activation):
    name = "sreglu"


class SiLU(_Activation):
    name = "silu"


class SwiGLU(_Activation):
    """glu_interleave_size: gate and linear part come in turn, in blocks of that many columns."""

    name = "swiglu"

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size

    def forward(self, x: Input) -> torch.Tensor:
        if self.glu_interleave_size is not None:
            x = deinterleaved(plain(x), self.glu_interleave_size, -1)
        return super().forward(x)


class ClampedSwiGLU(SwiGLU):
    """limit, alpha, glu_linear_offset: as activation_params of quire.LayerNormMLP."""

    name = "clamped_swiglu"

    def __init__(
        self, *, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0, **options: object
    ) -> None:
        self._params = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        super().__init__(**options)

    def _named(self) -> str:
        return activation_text("te.ops.ClampedSwiGLU", self.name, self._params)


class SiTUGLU(SwiGLU):
    """beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2) of the halves a and b, computed in float32."""

    def __init__(self, *, beta1: float = 4.0, beta2: float = 25.0, **options: object) -> None:
        super().__init__(**options)
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not math.isfinite(beta) or beta <= 0:
                raise ValueError(f"te.ops.{type(self).__name__}: {name} must be finite and positive, got {beta}")
        self.beta1, self.beta2 = float(beta1), float(beta2)

    def forward(self, x: Input) -> torch.Tensor:
        x = plain(x)
        if self.glu_interleave_size is not None:
            x = deinterleaved(x, self.glu_interleave_size, -1)
        cached = self.cache_quantized_input and torch.is_grad_enabled() and x.requires_grad
        compute = SoftCapsOfCodes.apply if cached else soft_caps
        return compute(x, self.beta1, self.beta2, activation_dtype(x))


class _Scaled(Operation):
    """The result is multiplied by an extra input, a number for each row."""

    num_extra_inputs = 1
    #: Whether backward computes the result again.
    activation_recompute_in_mlp = False

    def forward(self, x: Input, scales: torch.Tensor) -> torch.Tensor:
        return self.scaled(plain(x), scales)

    def scaled(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """forward() without recomputation."""
        y = super().forward(x)
        return y * scales.unsqueeze(-1).to(y.dtype)


class _ScaledGLU(_Scaled):
    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False, **options: object
    ) -> None:
        if activation_recompute_in_mlp:
            raise ValueError(
                f"te.ops.{type(self).__name__}: it does not support activation recomputation; leave "
                "activation_recompute_in_mlp False, and call it within te.checkpoint"
            )
        super().__init__(glu_interleave_size=glu_interleave_size, **options)


class ScaledSReLU(_Scaled, SReLU):
    """SReLU, scaled by rows.

    activation_recompute_in_mlp: backward computes the result again (te.checkpoint), with the matmul of a GroupedLinear
    that follows in a Sequential: it would save the result otherwise.
    """

    def __init__(self, *, activation_recompute_in_mlp: bool = False, **options: object) -> None:
        super().__init__(**options)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def forward(self, x: Input, scales: torch.Tensor) -> torch.Tensor:
        if self.activation_recompute_in_mlp:
            return checkpoint(self.scaled, plain(x), scales)
        return super().forward(x, scales)


class ScaledSwiGLU(_ScaledGLU, SwiGLU):
    """SwiGLU, scaled by rows."""


class ScaledClampedQGeGLU(_ScaledGLU, ClampedSwiGLU):
    """ClampedSwiGLU, scaled by rows."""


class ScaledSiTUGLU(_ScaledGLU, SiTUGLU):
    """SiTUGLU, scaled by rows."""
