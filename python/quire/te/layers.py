"""quire's layers with what TransformerEngine's take besides, and what its frameworks ask of them: subclasses, which
compute as quire's do."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from quire.checks import check_options
from quire.distributed import Parallel
from quire.nn import grouped_linear, layernorm_linear, layernorm_mlp, linear, norm
from quire.nn.product_module import ProductModule
from quire.te import fp8_meta
from quire.te.arguments import DIVIDING, OVERLAPPING, USER_BUFFERS, also_takes, signature_with
from quire.te.dividing import MLP_DIVIDING, divides, divides_shapes
from quire.te.split import Split, names_and_sizes, split

#: TransformerEngine's order, after eps.
_LINEAR_ORDER = (
    "sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker init_method bias normalization "
    "return_bias params_dtype parallel_mode return_layernorm_output return_layernorm_output_gathered parameters_split "
    "zero_centered_gamma device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad ub_name "
    "delay_wgrad_compute symmetric_ar_type name"
).split()
_MLP_ORDER = (
    "sequence_parallel return_bias get_rng_state_tracker tp_group tp_size init_method bias normalization activation "
    "activation_params output_layer_init_method fuse_wgrad_accumulation params_dtype return_layernorm_output "
    "return_layernorm_output_gathered seq_length micro_batch_size set_parallel_mode zero_centered_gamma device "
    "ub_overlap_ag name ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute "
    "symmetric_ar_type checkpoint"
).split()
#: After out_features.
_GROUPED_ORDER = (
    "sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker rng_tracker_name init_method "
    "bias return_bias params_dtype parallel_mode device ub_overlap_rs ub_overlap_ag ub_name delay_wgrad_compute "
    "save_original_input single_grouped_weight single_grouped_bias name use_grouped_tensor"
).split()
#: Sizes to warm up kernels for, which nothing here needs.
_WARM_UP = {"seq_length": None, "micro_batch_size": None}
_SYMMETRIC = {"symmetric_ar_type": None}


def _with_parts(construct: Callable[..., None]) -> Callable[..., None]:
    """parameters_split: the layer has a weight and a bias for each part of the outputs, q_weight, k_weight, ... for
    ("q", "k", "v") or {"q": 64, "k": 16, "v": 16}, in state_dict too; `weight` is their concatenation."""

    @functools.wraps(construct)
    def __init__(
        self: ProductModule,
        *args: object,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        parallel: Parallel | None = None,
        **keywords: object,
    ) -> None:
        if parameters_split is None:
            return construct(self, *args, parallel=parallel, **keywords)
        rows = inspect.signature(construct).bind(self, *args, **keywords).arguments["out_features"]
        names, sizes = names_and_sizes(f"quire.{type(self).__name__}", parameters_split, rows)
        processes = 1
        if parallel is not None and parallel.mode == "column":
            parallel, processes = parallel.of_parts(*sizes), parallel.size
        construct(self, *args, parallel=parallel, **keywords)
        split(self, _SPLIT.get(type(self)), names, [size // processes for size in sizes])

    __init__.__signature__ = signature_with(construct, {"parameters_split": None})
    return __init__


def _with_sequence_parallel(construct: Callable[..., None], what: str) -> Callable[..., None]:
    """Of a norm. sequence_parallel: a mark for frameworks that reduce gradients, which nothing here depends on."""
    options = [*inspect.signature(construct).parameters][1:] + ["sequence_parallel", "hidden_size"]

    def __init__(
        self: torch.nn.Module,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        *,
        hidden_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: object,
    ) -> None:
        check_options(what, options, unknown)
        if (normalized_shape is None) == (hidden_size is None):
            raise TypeError(
                f"{what}: normalized_shape and hidden_size are the same option; pass one of them, "
                f"got {normalized_shape!r} and {hidden_size!r}"
            )
        construct(
            self,
            hidden_size if normalized_shape is None else normalized_shape,
            eps,
            params_dtype=params_dtype,
            zero_centered_gamma=zero_centered_gamma,
            device=device,
            dtype=dtype,
        )
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel

    return __init__


class _Deferred(torch.nn.Module):
    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initialises the parameters again. With defer_init, nothing."""
        if not defer_init:
            super().reset_parameters()


class _Layer(_Deferred, ProductModule):
    fp8_meta = property(fp8_meta.fp8_meta)


class Linear(_Layer, linear.Linear):
    """quire.Linear, which also takes TransformerEngine's arguments."""

    __init__ = also_takes(
        divides(_with_parts(linear.Linear.__init__), "quire.Linear", DIVIDING | USER_BUFFERS),
        "quire.Linear",  # whose order is torch.nn.Linear's
        _SYMMETRIC,
    )


class LayerNormLinear(_Layer, layernorm_linear.LayerNormLinear):
    """quire.LayerNormLinear, which also takes TransformerEngine's arguments, in its order."""

    __init__ = also_takes(
        divides(
            _with_parts(layernorm_linear.LayerNormLinear.__init__), "quire.LayerNormLinear", DIVIDING | USER_BUFFERS
        ),
        "quire.LayerNormLinear",
        _SYMMETRIC | {"return_layernorm_output_gathered": False},
        order=_LINEAR_ORDER,
    )


class LayerNormMLP(_Layer, layernorm_mlp.LayerNormMLP):
    """quire.LayerNormMLP, which also takes TransformerEngine's arguments, in its order."""

    __init__ = also_takes(
        divides(layernorm_mlp.LayerNormMLP.__init__, "quire.LayerNormMLP", MLP_DIVIDING | USER_BUFFERS),
        "quire.LayerNormMLP",
        _SYMMETRIC | {"return_layernorm_output_gathered": False, "parallel_mode": None},
        ignored=_WARM_UP,
        order=_MLP_ORDER,
    )


class GroupedLinear(_Layer, grouped_linear.GroupedLinear):
    """quire.GroupedLinear, which also takes TransformerEngine's arguments, in its order."""

    __init__ = also_takes(
        divides_shapes(grouped_linear.GroupedLinear.__init__, "quire.GroupedLinear", DIVIDING),
        "quire.GroupedLinear",
        OVERLAPPING,
        # It chooses a path of TransformerEngine's, for m_splits that are tensors; they always can be here.
        ignored={"use_grouped_tensor": None},
        order=_GROUPED_ORDER,
    )


class LayerNorm(_Deferred, norm.LayerNorm):
    """quire.LayerNorm, which also takes TransformerEngine's arguments."""

    __init__ = _with_sequence_parallel(norm.LayerNorm.__init__, "quire.LayerNorm")


class RMSNorm(_Deferred, norm.RMSNorm):
    """quire.RMSNorm, which also takes TransformerEngine's arguments."""

    __init__ = _with_sequence_parallel(norm.RMSNorm.__init__, "quire.RMSNorm")


class SplitLinear(Split, Linear):
    """A Linear with parameters_split."""


class SplitLayerNormLinear(Split, LayerNormLinear):
    """A LayerNormLinear with parameters_split."""


_SPLIT: dict[type, type] = {Linear: SplitLinear, LayerNormLinear: SplitLayerNormLinear}
