"""quire's layers as operations: linear layers and norms, with the arguments of TransformerEngine's operations."""

from collections.abc import Callable

import torch

from quire.nn.grouped_linear import copied
from quire.te import layers
from quire.te.arguments import refuse
from quire.te.ops.operation import Input, Operation, in_dtype_of, plain


class Linear(Operation, layers.Linear):
    """quire.Linear, with its parameters and numerics. x is taken in the dtype of the weight.

    tensor_parallel_mode, tensor_parallel_group, sequence_parallel, rng_state_tracker_function and
    accumulate_into_main_grad are parallel_mode, tp_group, sequence_parallel, get_rng_state_tracker and
    fuse_wgrad_accumulation of te.Linear; without a group, all processes are one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: object = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], object] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        parallel = {}
        if tensor_parallel_mode is not None:
            group = torch.distributed.group.WORLD if tensor_parallel_group is None else tensor_parallel_group
            parallel = {
                "parallel_mode": tensor_parallel_mode,
                "tp_group": group,
                "tp_size": 1 if group is None else group.size(),
                "sequence_parallel": sequence_parallel,
                "get_rng_state_tracker": rng_state_tracker_function,
            }
        super().__init__(
            in_features,
            out_features,
            bias,
            device=device,
            dtype=dtype,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            **parallel,
        )

    def forward(self, x: Input, **options: object) -> Input:
        return super().forward(in_dtype_of(x, self.weight), **options)


class BasicLinear(Linear):
    """Linear without a bias. userbuffers_options must be None."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        userbuffers_options: dict[str, object] | None = None,
        **options: object,
    ) -> None:
        if "bias" in options:
            raise TypeError("te.ops.BasicLinear: there is no bias; use te.ops.Linear, or a te.ops.Bias after it")
        refuse("te.ops.BasicLinear", {"userbuffers_options": userbuffers_options}, {"userbuffers_options": None})
        super().__init__(in_features, out_features, bias=False, **options)


class GroupedLinear(Operation, layers.GroupedLinear):
    """quire.GroupedLinear, with its parameters and numerics. The number of rows of each group, int [num_groups], is an
    extra input.

    scale_bias: there is a second extra input, a number for each row, that the bias is multiplied with. It and the sum
    are computed in float32. Without a bias this has no effect.
    """

    num_extra_inputs = 1

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        rng_state_tracker_function: Callable[[], object] | None = None,
        accumulate_into_main_grad: bool = False,
        dtype: torch.dtype | None = None,
        scale_bias: bool = False,
        bias: bool = True,
        **options: object,
    ) -> None:
        if rng_state_tracker_function is not None:
            options["get_rng_state_tracker"] = rng_state_tracker_function
        super().__init__(
            num_groups,
            in_features,
            out_features,
            bias=bias,
            params_dtype=dtype,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            return_bias=scale_bias and bias,
            **options,
        )
        if self.return_bias:
            self.num_extra_inputs = 2

    def forward(self, x: Input, split_sizes: torch.Tensor, *scales: torch.Tensor, **options: object) -> torch.Tensor:
        x = in_dtype_of(plain(x), getattr(self, self.weight_names[0]))
        if len(scales) != self.num_extra_inputs - 1:
            raise TypeError(
                f"te.ops.GroupedLinear: it takes {self.num_extra_inputs} extra inputs, split_sizes"
                f"{' and scales of the bias' if self.return_bias else ''}; got {len(scales) + 1}"
            )
        if not scales:
            return super().forward(x, split_sizes, **options)
        if scales[0].shape not in (x.shape[:-1], (x.shape[:-1].numel(),)):
            raise ValueError(
                f"te.ops.GroupedLinear: scales must have a number for each of the {x.shape[:-1].numel()} rows, got "
                f"{[*scales[0].shape]}"
            )
        y, biases = super().forward(x, split_sizes, **options)
        ends = torch.as_tensor(split_sizes, dtype=torch.int64, device=y.device).cumsum(0)
        out = options.get("out")
        wide = (y.float() + _scaled_bias(biases, ends, scales[0], y)).to(y.dtype)
        return wide if out is None else copied(wide, out, ends)


def _scaled_bias(
    biases: torch.Tensor | list[torch.Tensor], ends: torch.Tensor, scales: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """The bias of each row's group, multiplied by the row's number; 0 for rows after the last group."""
    biases = biases if isinstance(biases, torch.Tensor) else torch.stack(biases)
    rows = torch.arange(y.shape[:-1].numel(), dtype=torch.int64, device=y.device)
    group = torch.searchsorted(ends, rows, right=True)
    each = torch.nn.functional.pad(biases.float(), (0, 0, 0, 1))[group].view(y.shape)
    return each * scales.float().view(*y.shape[:-1], 1)


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
