"""Linear operations: quire's layers under the arguments that TransformerEngine's operations have."""

from collections.abc import Callable

import torch

from quire.nn import grouped_linear, linear
from quire.te.arguments import refuse
from quire.te.ops.operation import Input, Operation, in_dtype_of


class Linear(Operation, linear.Linear):
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


class GroupedLinear(Operation, grouped_linear.GroupedLinear):
    """quire.GroupedLinear, with its parameters and numerics. The number of rows of each group, int [num_groups], is an
    extra input. scale_bias must be False."""

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
        **options: object,
    ) -> None:
        refuse("te.ops.GroupedLinear", {"scale_bias": scale_bias}, {"scale_bias": False})
        if rng_state_tracker_function is not None:
            options["get_rng_state_tracker"] = rng_state_tracker_function
        super().__init__(
            num_groups,
            in_features,
            out_features,
            params_dtype=dtype,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            **options,
        )

    def forward(self, x: Input, split_sizes: torch.Tensor, **options: object) -> torch.Tensor:
        return super().forward(in_dtype_of(x, getattr(self, self.weight_names[0])), split_sizes, **options)
