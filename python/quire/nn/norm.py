"""LayerNorm and RMSNorm, computed by quire's operators: the same bits on every instruction set, eager and compiled."""

import operator
from collections.abc import Iterable

import torch

from quire.checks import check_dense, check_eps, check_sizes, check_type, describe, with_known_options
from quire.distributed.placements import is_dtensor, layout_of_tokens, local, refuse_placements
from quire.functional import norm
from quire.nn.layer_base import ShownName, activation_dtype, check_factory, name_layer
from quire.nn.te_extra_state import drop_extra_state


def reset_norm(weight: torch.Tensor, bias: torch.Tensor | None, zero_centered: bool) -> None:
    """Sets the gain to 1 (weight 0 if 1 is added to it) and the bias to 0."""
    torch.nn.init.constant_(weight, 0.0 if zero_centered else 1.0)
    if bias is not None:
        torch.nn.init.zeros_(bias)


class _Norm(ShownName):
    normalization: str

    @with_known_options
    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        eps: float = 1e-5,
        *,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        what = f"quire.{self.normalization}"
        check_factory(what, device, params_dtype=params_dtype, dtype=dtype)
        check_eps(what, eps)
        check_type(what, bool, zero_centered_gamma=zero_centered_gamma)
        if None not in (dtype, params_dtype) and dtype != params_dtype:
            raise ValueError(
                f"{what}: dtype and params_dtype are the same option, got {dtype} and {params_dtype}; pass one"
            )
        several = isinstance(normalized_shape, Iterable) and not isinstance(normalized_shape, torch.Tensor)
        sizes = tuple(normalized_shape) if several else (normalized_shape,)
        if not sizes or not all([hasattr(size, "__index__") and not isinstance(size, bool) for size in sizes]):
            raise ValueError(f"{what}: normalized_shape must be one or more sizes, got {describe(normalized_shape)}")
        check_sizes(what, **{f"normalized_shape[{i}]": size for i, size in enumerate(sizes)})
        self.normalized_shape = tuple([operator.index(size) for size in sizes])
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        options = {"device": device, "dtype": params_dtype if dtype is None else dtype}
        self.weight = torch.nn.Parameter(torch.empty(self.normalized_shape, **options))
        has_bias = self.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.empty(self.normalized_shape, **options)) if has_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the gain to 1 (weight 0 with zero_centered_gamma) and the bias to 0."""
        reset_norm(self.weight, self.bias, self.zero_centered_gamma)

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *options: object) -> None:
        drop_extra_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [*, *normalized_shape] -> the same shape, in the dtype of torch.autocast if it is enabled, else in x's
        dtype.

        A DTensor x needs parameters that are DTensors which all ranks have whole (PyTorch's SequenceParallel). The
        result is one too. Where tokens are sharded, gradients of parameters are partial sums.

        x, weight and bias can each be float32, float16 or bfloat16 (weight and bias alike).

        Raises:
            RuntimeError: if dtypes or devices do not fit.
            TypeError: for what is no dense tensor.
            ValueError: if the shape of x does not end with normalized_shape.
        """
        try:
            sizes, layout, given = self.normalized_shape, None, x
            if is_dtensor(x):
                layout = layout_of_tokens(x, self._parameters.items(), f"quire.{self.normalization}", len(sizes))
                x = layout.take(x)
            elif is_dtensor(self.weight):
                refuse_placements(f"quire.{self.normalization}", "weight", self.weight)
            dtype, gradients = activation_dtype(x), None if layout is None else layout.gradients
            check_dense(f"quire.{self.normalization}", x=x)
            if tuple(x.shape[-len(sizes) :]) != sizes:
                raise ValueError(
                    f"quire.{self.normalization}: x must be [*, {', '.join(map(str, sizes))}], got {[*x.shape]}"
                )
            weight, bias = local(self.weight, gradients), local(self.bias, gradients)
            y, _ = norm(
                x if len(sizes) == 1 else x.flatten(-len(sizes)),
                weight.flatten(),
                None if bias is None else bias.flatten(),
                self.normalization,
                dtype,
                eps=self.eps,
                zero_centered=self.zero_centered_gamma,
            )
            y = y if len(sizes) == 1 else y.unflatten(-1, sizes)
            return y if layout is None else layout.give(y, given)
        except Exception as error:
            name_layer(error, self)
            raise

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions (numerics.md 11.2).

    If each rank has some of the tokens (sequence parallelism), the gradients of weight and bias are sums over this
    rank's tokens: reduce them over the group. quire.te.LayerNorm takes `sequence_parallel`, which marks its parameters
    for frameworks that do so.

    Args:
        normalized_shape: the sizes of the last dimensions, over which it normalizes.
        eps: is added to the variance.
        params_dtype: the dtype of the parameters. None: torch's default.
        zero_centered_gamma: the factor is weight + 1, and weight starts at 0.
        device: the device of the parameters. None: torch's default.
        dtype: the same as params_dtype, under the name that torch.nn.Linear has for it.

    Raises:
        TypeError: for an unknown option, and for a value of the wrong type.
        ValueError: if dtype and params_dtype differ, for a normalized_shape that is none, and for an eps that is not
            finite or below 0.

    Shape:
        - x and y: `[*, *normalized_shape]`.
    """

    normalization = "LayerNorm"


class RMSNorm(_Norm):
    """y = x / sqrt(mean of x^2 + eps) * weight over the last dimensions. Options as for LayerNorm; no bias.

    Args:
        normalized_shape: the sizes of the last dimensions, over which it normalizes.
        eps: is added to the mean of the squares.
        params_dtype: the dtype of the parameters. None: torch's default.
        zero_centered_gamma: the factor is weight + 1, and weight starts at 0.
        device: the device of the parameters. None: torch's default.
        dtype: the same as params_dtype, under the name that torch.nn.Linear has for it.

    Raises:
        TypeError: for an unknown option, and for a value of the wrong type.
        ValueError: if dtype and params_dtype differ, for a normalized_shape that is none, and for an eps that is not
            finite or below 0.

    Shape:
        - x and y: `[*, *normalized_shape]`.
    """

    normalization = "RMSNorm"
