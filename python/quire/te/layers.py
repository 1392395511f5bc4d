"""quire's layers with what TransformerEngine's take besides, and what its frameworks ask of them: subclasses, which
compute as quire's do."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.checks import check_options, check_type, check_type_or_none, describe
from quire.delayed import delayed_state
from quire.distributed import check_ranks
from quire.distributed.groups import group_size
from quire.distributed.parallel import MODES, Parallel
from quire.loading.devices import has_values
from quire.nn import grouped_linear, layernorm_linear, layernorm_mlp, linear, norm
from quire.nn.layer_base import initialise
from quire.nn.norm import reset_norm
from quire.nn.product_module import Parameters, ProductModule
from quire.te.arguments import IN_PIECES, OVERLAPPING, SHARDING, USER_BUFFERS, also_takes, refuse, signature_with
from quire.tensor import QuantizedTensor

# --- TransformerEngine's arguments of tensor and sequence parallelism, as quire.distributed.Parallel


#: LayerNormMLP has this one instead of parallel_mode.
MLP_SHARDING = {name: value for name, value in SHARDING.items() if name != "parallel_mode"} | {
    "set_parallel_mode": False
}
_TRACKER = "model-parallel-rng"


def takes_parallel(construct: Callable[..., None], what: str, known: dict[str, object]) -> Callable[..., None]:
    """A constructor that takes TransformerEngine's arguments `known` and passes what they ask for as parallel=.

    tp_group, tp_size, sequence_parallel, and parallel_mode "column" or "row" (of LayerNormMLP set_parallel_mode) are
    those of quire.distributed.Parallel. Groups of one process do nothing. tp_size alone: the layer gets its group
    by set_tensor_parallel_group(), and each rank draws its part alone, from the tracker. get_rng_state_tracker: the
    weight is drawn within get_rng_state_tracker().fork(rng_tracker_name), so that ranks may draw different ones.
    ub_overlap_*: overlap="ring"; the other ub_* change nothing then. They go with sequence_parallel, otherwise
    NotImplementedError is raised for them.
    """

    @functools.wraps(construct)
    def __init__(self: object, *args: object, **keywords: object) -> None:
        parallel, drawing = _taken(what, keywords, known)
        if parallel is not None:
            keywords["parallel"] = parallel
        with drawing:
            construct(self, *args, **keywords)

    __init__.__signature__ = signature_with(construct, known)
    return __init__


def shards_weights(construct: Callable[..., None], what: str, known: dict[str, object]) -> Callable[..., None]:
    """takes_parallel() for a GroupedLinear. Only its weights are sharded, as in TransformerEngine, and nothing is sent:
    y of a "row" layer and the gradient of x of a "column" layer are this rank's shard of a sum, which the caller adds
    up, and scales follow from this rank's shard of an operand. Raises NotImplementedError for a bias."""

    @functools.wraps(construct)
    def __init__(
        self: object, num_gemms: int, in_features: int, out_features: int, *args: object, **keywords: object
    ) -> None:
        parallel, drawing = _taken(what, keywords, known)
        if parallel is not None:
            in_features, out_features = parallel.sizes(what, in_features, out_features)
            if keywords.get("bias", True):
                raise NotImplementedError(
                    f"{what}: a layer that is sharded over ranks has no bias, which would be added once for each "
                    "rank; pass bias=False"
                )
            self.drawn_as = parallel
        with drawing:
            construct(self, num_gemms, in_features, out_features, *args, **keywords)

    __init__.__signature__ = signature_with(construct, known)
    return __init__


def _taken(
    what: str, keywords: dict[str, object], known: dict[str, object]
) -> tuple[Parallel | None, contextlib.AbstractContextManager[object]]:
    """Removes the arguments `known` from the keywords. Returns the Parallel for which they ask, and the context in
    which weights are drawn."""
    given = known | {name: keywords.pop(name) for name in known if name in keywords}
    parallel, tracker = _parallel(what, given, keywords.get("device")), given["get_rng_state_tracker"]
    if parallel is None or not tracker:
        return parallel, contextlib.nullcontext()
    return parallel, _drawing(tracker().fork(given["rng_tracker_name"] or _TRACKER))


@contextlib.contextmanager
def _drawing(fork: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """A context with the state of a tracker, which can differ between ranks."""
    with fork, check_ranks.own_draws():
        yield


def _parallel(what: str, given: dict[str, object], device: object) -> Parallel | None:
    group, mode = given["tp_group"], given.get("parallel_mode", "column" if given.get("set_parallel_mode") else None)
    size = given["tp_size"] if group is None else group_size(group)
    check_type(what, bool, sequence_parallel=given["sequence_parallel"])
    check_type(what, int, tp_size=given["tp_size"])
    check_type_or_none(what, Callable, get_rng_state_tracker=given["get_rng_state_tracker"])
    if mode not in (None, *MODES):
        raise NotImplementedError(f"{what}: parallel_mode={mode!r} is not available; use 'column', 'row' or None")
    if size == 0:
        raise TypeError(f"{what}: tp_group must be a process group of torch.distributed or None, got {describe(group)}")
    if size != 1 and group is None and mode is None:
        raise NotImplementedError(
            f"{what}: tp_size={size} without tp_group is not available without parallel_mode; pass parallel_mode, and "
            "the group here or to set_tensor_parallel_group"
        )
    on_meta = device is not None and not has_values(torch.device(device))
    if size != 1 and group is None and not (given["get_rng_state_tracker"] or on_meta):
        raise NotImplementedError(
            f"{what}: tp_size={size} without tp_group is not available without get_rng_state_tracker: all ranks "
            "would draw the same part of the weight; pass tp_group, or a tracker whose states differ between "
            "ranks, or device='meta'"
        )
    overlaps = {name: given[name] for name in USER_BUFFERS if name in given}
    if size == 1 or mode is None:
        refuse(what, overlaps, USER_BUFFERS, _OVERLAPS_TOKENS)
        return None
    return Parallel(
        mode, group, given["sequence_parallel"], size, overlap=_overlap(what, overlaps, given["sequence_parallel"])
    )


_OVERLAPS_TOKENS = (
    "It overlaps the exchange of tokens between ranks: pass parallel_mode, a tp_group of several ranks and "
    "sequence_parallel=True too"
)


def _overlap(what: str, given: dict[str, object], sequence: bool) -> str | None:
    """The value of Parallel.overlap for the arguments of USER_BUFFERS."""
    check_type(what, bool, **{name: value for name, value in given.items() if name != "ub_name"})
    check_type_or_none(what, str, ub_name=given.get("ub_name"))
    asked = [name for name, value in given.items() if value != USER_BUFFERS[name]]
    if asked and not sequence:
        raise NotImplementedError(
            f"{what}: {asked[0]}={given[asked[0]]!r} overlaps the exchange of tokens, and is not available without "
            "sequence_parallel=True"
        )
    return "ring" if any(given.get(name) for name in IN_PIECES) else None


# --- parameters_split: weight and bias are several parameters, one for each part of the outputs


_OPTIONS = {"fuse_wgrad_accumulation": False, "delay_wgrad_compute": False}


def _joined(parts: Parameters, names: Sequence[str]) -> torch.Tensor | None:
    return torch.cat([parts[name] for name in names]) if names else None


class Split(ProductModule):
    """A layer that has parameters q_weight, k_weight, q_bias, ... for parameters_split=("q", "k").

    `weight` and `bias` are their concatenations, made anew each time they are read. The parts may be computed from
    other parameters (pruned, parametrized).
    """

    shown_in = "quire.te"
    part_sizes: tuple[int, ...]

    @property
    def weight(self) -> torch.Tensor:
        return _joined({name: getattr(self, name) for name in self.weight_names}, self.weight_names)

    @property
    def bias(self) -> torch.Tensor | None:
        return _joined({name: getattr(self, name) for name in self.bias_names}, self.bias_names)

    def weights(self, product: str, parameters: Parameters | None = None) -> dict[str, torch.Tensor]:
        return super().weights(product, parameters and {"weight": _joined(parameters, self.weight_names)})

    def biases(self, product: str, parameters: Parameters | None = None) -> list[torch.Tensor]:
        return super().biases(product, parameters and {"bias": _joined(parameters, self.bias_names)})

    def own_parts(self) -> dict[str, Parallel]:
        if not self.has_parts:
            return {}
        each = self.parallel.of_one_part()
        return dict.fromkeys(self.weight_names + (self.bias_names if each.mode == "column" else ()), each)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """As the unsplit layer's, with the values that it would get. With defer_init, nothing."""
        if defer_init:
            return
        if isinstance(self, layernorm_linear.LayerNormLinear):
            reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        with torch.no_grad():
            weight, bias = (None if own is None else torch.empty_like(own) for own in (self.weight, self.bias))
            initialise(weight, bias, self.init_method, self.parallel)
            for names, values in ((self.weight_names, weight), (self.bias_names, bias)):
                for name, part in zip(names, () if values is None else values.split(self.part_sizes), strict=True):
                    self._parameters[name].copy_(part)
        self._reset_sr_states()


def split(layer: ProductModule, into: type[Split] | None, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Splits the parameters of a layer that has just been constructed into parts with these names and numbers of
    outputs. into: the class with parts; None if there is none. Raises NotImplementedError for options that parts do not
    support."""
    kind, given = type(layer), {name: getattr(layer, name) for name in _OPTIONS}
    refuse(f"quire.{kind.__name__} with parameters_split", given, _OPTIONS)
    if into is None or isinstance(layer.weight, QuantizedTensor):
        what = f"in {kind.__name__}, a subclass" if into is None else "within quantized_model_init"
        raise NotImplementedError(
            f"quire.{kind.__name__}: parameters_split is not available {what}; use a layer for each part, or split the "
            "result (of MultiheadAttention and TransformerLayer: pass fuse_qkv_params=True)"
        )
    split_up = {what: layer._parameters.pop(what) for what in ("weight", "bias")}
    layer.__class__ = into
    layer.part_sizes, layer.weight_names, layer.bias_names = tuple(sizes), (), ()
    for what, values in split_up.items():
        if values is None:
            continue
        part_names = tuple(f"{name}_{what}" for name in names)
        setattr(layer, f"{what}_names", part_names)
        for name, part in zip(part_names, values.detach().split(sizes), strict=True):
            layer.register_parameter(name, torch.nn.Parameter(part.clone()))


def names_and_sizes(
    what: str, parts: Sequence[str] | Mapping[str, int], rows: int
) -> tuple[list[str], tuple[int, ...]]:
    """The names and sizes that parameters_split asks for: names of equal parts of `rows` outputs, or name -> size.
    Raises ValueError if they do not fit."""
    wrong = isinstance(parts, str) or not isinstance(parts, Mapping | Sequence)
    names = [] if wrong else [str(name).rstrip("_") for name in parts]
    sizes = tuple(parts.values()) if isinstance(parts, Mapping) else (rows // max(len(names), 1),) * len(names)
    whole = all(isinstance(size, int) and size >= 0 for size in sizes) and sum(sizes) == rows
    if not names or len(set(names)) < len(names) or "" in names or not whole:
        raise ValueError(
            f"{what}: parameters_split must be different names of parts of equal size, or name -> size, that "
            f"make up out_features = {rows}; got {parts!r}"
        )
    return names, sizes


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


# --- fp8_meta: what a layer knows of delayed scaling, under TransformerEngine's names and in its order


#: Of FP8GlobalStateManager.get_meta_tensor_key: whether forward -> key. Key -> the name in delayed_state, slots.
KEYS = {True: "scaling_fwd", False: "scaling_bwd"}
_KINDS = {"scaling_fwd": ("fwd", 3), "scaling_bwd": ("bwd", 2)}


class _Copy(torch.Tensor):
    """A copy of a state, made in inference mode, so that PyTorch raises an error where somebody writes to it: that
    would change the copy only. The class says in the error what to do instead. Its views are of this class too."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: dict | None = None
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            try:
                found = func(*args, **kwargs or {})
            except RuntimeError as error:
                if "Inplace update to inference tensor" not in str(error):
                    raise
                raise RuntimeError(
                    f"quire.te: {getattr(func, '__name__', func)} would write to fp8_meta, which has copies of the "
                    "scales and amaxes of delayed scaling; change the state by quire.set_delayed_state(model, state), "
                    "where state is quire.delayed_state(model) with other values"
                ) from error
            return type(found)(map(cls._own, found)) if type(found) in (tuple, list) else cls._own(found)

    @classmethod
    def _own(cls, found: object) -> object:
        is_copy = type(found) is torch.Tensor and found.is_inference() and not torch.is_inference_mode_enabled()
        return found.as_subclass(cls) if is_copy else found

    def plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).clone()

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.plain()

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.plain().__reduce_ex__(protocol)


@dataclass(frozen=True, eq=False)
class ScalingMeta:
    """scale: float32 [n]. amax_history: float32 [L, n], whose row 0 has the amaxes of the running step. n counts, for
    each matmul of the layer and for each group of rows, x, w and y, or dy and dx."""

    scale: torch.Tensor
    amax_history: torch.Tensor


def fp8_meta(self: torch.nn.Module) -> dict[str, ScalingMeta]:
    """Copies of the scales and amaxes of delayed scaling: "scaling_fwd" and "scaling_bwd". Empty if the layer has not
    run under delayed scaling.

    They belong to the running step, which ends when the next autocast begins. They can be read and not written;
    quire.set_delayed_state() changes the state.
    """
    states = list(delayed_state(self).values())
    if not states:
        return {}
    with torch.inference_mode():
        found = {
            key: [_of(states, kind, key).as_subclass(_Copy) for kind in ("scale", "amax_history")] for key in _KINDS
        }
    return {key: ScalingMeta(*each) for key, each in found.items()}


def _of(states: list[dict[str, torch.Tensor]], kind: str, key: str) -> torch.Tensor:
    direction, slots = _KINDS[key]
    found = [state[f"{kind}_{direction}"].unflatten(-1, (slots, -1)).transpose(-1, -2).flatten(-2) for state in states]
    if kind == "scale":
        return torch.cat(found)
    rows = max(len(history) for history in found)
    return torch.cat([torch.nn.functional.pad(history, (0, 0, 0, rows - len(history))) for history in found], -1)


# --- the layers


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


def _with_sequence_parallel(construct: Callable[..., None], what: str) -> Callable[..., None]:
    """The constructor of a norm. sequence_parallel: a mark for frameworks that reduce gradients; quire does not read
    it."""
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
    shown_in = "quire.te"

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initialises the parameters again. With defer_init, nothing."""
        if not defer_init:
            super().reset_parameters()


class _Layer(_Deferred, ProductModule):
    fp8_meta = property(fp8_meta)


class Linear(_Layer, linear.Linear):
    """quire.Linear, which also takes TransformerEngine's arguments."""

    __init__ = also_takes(
        takes_parallel(_with_parts(linear.Linear.__init__), "quire.Linear", SHARDING | USER_BUFFERS),
        "quire.Linear",  # whose order is torch.nn.Linear's
        _SYMMETRIC,
    )


class LayerNormLinear(_Layer, layernorm_linear.LayerNormLinear):
    """quire.LayerNormLinear, which also takes TransformerEngine's arguments, in its order."""

    __init__ = also_takes(
        takes_parallel(
            _with_parts(layernorm_linear.LayerNormLinear.__init__), "quire.LayerNormLinear", SHARDING | USER_BUFFERS
        ),
        "quire.LayerNormLinear",
        _SYMMETRIC | {"return_layernorm_output_gathered": False},
        order=_LINEAR_ORDER,
    )


class LayerNormMLP(_Layer, layernorm_mlp.LayerNormMLP):
    """quire.LayerNormMLP, which also takes TransformerEngine's arguments, in its order."""

    __init__ = also_takes(
        takes_parallel(layernorm_mlp.LayerNormMLP.__init__, "quire.LayerNormMLP", MLP_SHARDING | USER_BUFFERS),
        "quire.LayerNormMLP",
        _SYMMETRIC | {"return_layernorm_output_gathered": False, "parallel_mode": None},
        ignored=_WARM_UP,
        order=_MLP_ORDER,
    )


class GroupedLinear(_Layer, grouped_linear.GroupedLinear):
    """quire.GroupedLinear, which also takes TransformerEngine's arguments, in its order."""

    __init__ = also_takes(
        shards_weights(grouped_linear.GroupedLinear.__init__, "quire.GroupedLinear", SHARDING),
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
