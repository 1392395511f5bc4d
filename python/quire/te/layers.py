"""What TransformerEngine's layers take, and what its frameworks ask of them, given to quire's layers.

quire's classes stay the only ones: adopt_names() puts functions around their methods, once, when quire is imported. So
a layer that quire.convert, a pickle or a subclass makes answers to these names too.
"""

import functools
import inspect
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from quire.autocast import autocast
from quire.checks import check_options
from quire.distributed import Parallel
from quire.distributed.groups import named_group
from quire.nn.grouped_linear import GroupedLinear
from quire.nn.layernorm_linear import LayerNormLinear
from quire.nn.layernorm_mlp import LayerNormMLP
from quire.nn.linear import Linear
from quire.nn.norm import LayerNorm, RMSNorm
from quire.nn.product_module import ProductModule
from quire.recipe import Recipe
from quire.te.arguments import DIVIDING, OVERLAPPING, USER_BUFFERS, also_takes, group_size, signature_with
from quire.te.deferred_gradients import marking, register_wgrad_accumulation_and_reduce_hooks, with_hooks
from quire.te.dividing import MLP_DIVIDING, divides, divides_shapes
from quire.te.fp8_meta import fp8_meta
from quire.te.grouped_tensor import adopt_grouped_names
from quire.te.quantizers import quantizer_of
from quire.te.split import names_and_sizes, split
from quire.te.tensors import get_data_tensors, with_noop_flag, with_usages
from quire.tensor import QuantizedActivation, QuantizedTensor

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
#: Class -> what its constructor takes besides; Linear has torch.nn.Linear's order.
_CONSTRUCTORS: dict[type, dict[str, object]] = {
    Linear: {"refused": _SYMMETRIC},
    LayerNormLinear: {
        "refused": _SYMMETRIC | {"return_layernorm_output_gathered": False},
        "order": _LINEAR_ORDER,
    },
    LayerNormMLP: {
        "refused": _SYMMETRIC | {"return_layernorm_output_gathered": False, "parallel_mode": None},
        "ignored": _WARM_UP,
        "order": _MLP_ORDER,
    },
    # use_grouped_tensor chooses a path of TransformerEngine's, for m_splits that are tensors; they always can be here.
    GroupedLinear: {"refused": OVERLAPPING, "ignored": {"use_grouped_tensor": None}, "order": _GROUPED_ORDER},
}


def adopt_names() -> None:
    """Makes quire's classes take TransformerEngine's arguments and have its methods."""
    for layer in (Linear, LayerNormLinear):
        layer.__init__ = _with_parts(layer.__init__)
    for layer, dividing in ((Linear, DIVIDING), (LayerNormLinear, DIVIDING), (LayerNormMLP, MLP_DIVIDING)):
        layer.__init__ = divides(layer.__init__, f"quire.{layer.__name__}", dividing | USER_BUFFERS)
    GroupedLinear.__init__ = divides_shapes(GroupedLinear.__init__, "quire.GroupedLinear", DIVIDING)
    for layer, further in _CONSTRUCTORS.items():
        layer.__init__ = marking(layer.__init__)
        layer.__init__ = also_takes(layer.__init__, f"quire.{layer.__name__}", **further)
    for norm in (LayerNorm, RMSNorm):
        norm.__init__ = _with_sequence_parallel(norm.__init__, f"quire.{norm.__name__}")
    for layer in (*_CONSTRUCTORS, LayerNorm, RMSNorm):
        layer.reset_parameters = _deferred(layer.reset_parameters)
    for kind in (ProductModule, LayerNorm, RMSNorm):
        kind._load_from_state_dict = without_extra_state(kind)
    for name in ("register_parameter", "_apply"):
        setattr(ProductModule, name, marking(getattr(ProductModule, name)))
    ProductModule.set_tensor_parallel_group = set_tensor_parallel_group
    ProductModule.register_wgrad_accumulation_and_reduce_hooks = register_wgrad_accumulation_and_reduce_hooks
    ProductModule.backward_dw = with_hooks(ProductModule.backward_dw)
    ProductModule.use_bias = property(_use_bias, doc="Whether the layer has biases.")
    ProductModule.fp8_meta = property(fp8_meta)
    for kind in ("weight", "bias"):
        setattr(GroupedLinear, f"single_grouped_{kind}", property(functools.partial(_is_single, kind)))
    autocast.__init__ = _with_graph(autocast.__init__)
    QuantizedTensor.quantize_ = with_noop_flag(QuantizedTensor.quantize_)
    QuantizedTensor.update_usage = with_usages(QuantizedTensor.update_usage)
    for kind in (QuantizedTensor, QuantizedActivation):
        kind.get_data_tensors = get_data_tensors
        kind.quantizer = property(quantizer_of)
    adopt_grouped_names()


def set_tensor_parallel_group(self: ProductModule, tp_group: object) -> None:
    """Gives a group to a layer that was made with tp_size and without tp_group; all ranks of the group must call
    it. Of other layers it takes None, groups of one process and the layer's own. Raises ValueError for a group of
    another size, NotImplementedError for other groups."""
    size, own = group_size(tp_group), self.of(self.products[0], "parallel")
    if own is not None and not own.group and tp_group is not None:
        divided = [(product, self.of(product, "parallel").of_group(tp_group)) for product in self.products]
        for product, parallel in divided:
            self.divide(product, parallel)
        return
    if size != 1 and (own is None or named_group(own.group) != tp_group):
        raise NotImplementedError(
            f"quire.{type(self).__name__}: a layer is sharded over ranks when it is made, and this one was not; "
            f"got a group of {size} ranks. Pass tp_group and parallel_mode to the constructor"
        )


def _is_single(kind: str, self: GroupedLinear) -> bool:
    """Whether all groups have one parameter."""
    return kind in self._parameters


def _use_bias(self: ProductModule) -> bool:
    return any([self._parameters.get(name) is not None for name in self.bias_names])


def _with_parts(construct: Callable[..., None]) -> Callable[..., None]:
    """parameters_split: the layer has a weight and a bias for each part of the outputs, q_weight, k_weight, ... for
    ("q", "k", "v") or {"q": 64, "k": 16, "v": 16}, in state_dict too; `weight` is their concatenation."""

    @functools.wraps(construct)
    def __init__(
        self: Linear | LayerNormLinear,
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
        split(self, names, [size // processes for size in sizes])

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


def _deferred(reset: Callable[[torch.nn.Module], None]) -> Callable[..., None]:
    def reset_parameters(self: torch.nn.Module, defer_init: bool | None = False) -> None:
        if not defer_init:
            reset(self)

    reset_parameters.__doc__ = f"{reset.__doc__} With defer_init, nothing."
    return reset_parameters


def _with_graph(construct: Callable[..., None]) -> Callable[..., None]:
    options = [*inspect.signature(construct).parameters][1:]

    def __init__(
        self: autocast,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        amax_reduction_group: object = None,
        _graph: bool = False,
        **unknown: object,
    ) -> None:
        if unknown:
            check_options("autocast", options, unknown)
        if _graph is not False:
            raise NotImplementedError(
                f"autocast: _graph={_graph!r} is what TransformerEngine sets while it captures CUDA graphs; leave it "
                "False"
            )
        construct(self, enabled, calibrating, recipe, amax_reduction_group)

    return __init__


def without_extra_state(kind: type[torch.nn.Module], *older: str) -> Callable[..., None]:
    """Modules whose state_dict has no extra state, and that load one which has, as TransformerEngine writes it. older:
    names that earlier versions gave it."""
    load = kind._load_from_state_dict

    def _load_from_state_dict(
        self: torch.nn.Module, state_dict: dict[str, object], prefix: str, *options: object
    ) -> None:
        extra = {name: state_dict.pop(prefix + name, None) for name in ("_extra_state", *older)}
        for name in [name for name, value in extra.items() if _holds_something(value)]:
            warnings.warn(
                f"quire.{type(self).__name__}: {prefix}{name}, TransformerEngine's state of delayed scaling, is "
                "pickled and not read; scales start anew. To restore it, call "
                "quire.set_delayed_state(model, quire.io.te_states(model, state_dict))",
                stacklevel=2,
            )
        load(self, state_dict, prefix, *options)

    return _load_from_state_dict


def _holds_something(extra: object) -> bool:
    """TransformerEngine's is None, an empty tensor, bytes or a file; the last of recipes with a state."""
    if isinstance(extra, torch.Tensor):
        return extra.numel() > 0
    return bool(extra.getbuffer().nbytes if isinstance(extra, io.BytesIO) else extra)
