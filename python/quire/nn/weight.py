"""Weights that are no plain parameters: those that are stored only in quantized form, how modules create them
(quantized_model_init) and pass them to operators; and those that hooks of PyTorch compute from other parameters."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from quire.checks import check_type
from quire.functional import Buffers, quantize
from quire.recipe import Recipe, as_recipe, default
from quire.tensor import QuantizedStack, QuantizedTensor
from quire.tensor.order import kept_directions, same_codes
from quire.tensor.writes import SAME_LAYERS


@dataclass(frozen=True)
class _Options:
    recipe: Recipe
    preserve_high_precision_init_val: bool
    keep_master: bool


class _State(threading.local):
    def __init__(self) -> None:
        self.options: _Options | None = None


_STATE = _State()


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | str | None = None,
    preserve_high_precision_init_val: bool = False,
    *,
    keep_master: bool = False,
) -> Iterator[None]:
    """Modules of quire that are constructed within this context have quantized weights: `weight` is a parameter of
    class QuantizedTensor under the recipe's spec for w (with single_grouped_weight a QuantizedStack). No copy in high
    precision is kept. Per thread.

    Of PyTorch's parallel engines, DistributedDataParallel accepts such weights. In its first broadcast all ranks get
    the first rank's weights: master weights rounded to the parameter's dtype, others rounded once more. If the ranks
    start with equal weights, init_sync=False avoids this. fully_shard raises NotImplementedError, except for weights
    with keep_master that quire.distributed.gather_codes has prepared.

    Weights are quantized in both directions if grad is enabled, else (for inference) only rowwise.

    Args:
        enabled: False creates plain weights, also inside an enabled quantized_model_init.
        recipe: None is quire.recipe.default(). Layers with such weights run only under recipes with the same spec for
            w.
        preserve_high_precision_init_val: keep the initial values on the CPU, in the parameter's dtype.
            weight.get_high_precision_init_val() returns them, None after weight.clear_high_precision_init_val().
        keep_master: keep float32 master weights as weight.master. Optimizers update the master weights, and codes are
            quantized from them after each update. PyTorch's operators read the master weights too, in the parameter's
            dtype. Without master weights an update is rounded to the format, so small
            updates are lost. That is sufficient for 8-bit formats with learning rates that are not too small; 4-bit
            formats do not train.

    Raises:
        TypeError: if recipe is not a recipe, and for a flag that is no bool.
        ValueError: for an unknown name or text of a recipe, and if a module's weight is on the meta device and initial
            values are to be kept.
    """
    recipe = as_recipe("quantized_model_init", recipe)
    flags = {"preserve_high_precision_init_val": preserve_high_precision_init_val, "keep_master": keep_master}
    check_type("quantized_model_init", bool, enabled=enabled, **flags)
    outer = _STATE.options
    options = _Options(recipe or default(), preserve_high_precision_init_val, keep_master) if enabled else None
    _STATE.options = options
    try:
        yield
    finally:
        _STATE.options = outer


def initial_weight(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter that a module's constructor stores: `parameter`, or within quantized_model_init a quantized one."""
    options = _STATE.options
    if options is None:
        return parameter
    values = parameter.detach()
    if options.preserve_high_precision_init_val and values.is_meta:
        raise ValueError(
            "quantized_model_init: preserve_high_precision_init_val=True needs values, and this weight is on the meta "
            "device; construct the module on a device that has them"
        )
    matrices = values.unbind() if values.dim() == 3 else [values]
    each = [quantize(one, options.recipe.weight_spec, columnwise=torch.is_grad_enabled()) for one in matrices]
    q = QuantizedStack.of(each) if values.dim() == 3 else each[0]
    if options.keep_master:
        q.master = values.to(torch.float32, copy=True)
    quantized = torch.nn.Parameter(q, parameter.requires_grad)
    if options.preserve_high_precision_init_val:
        quantized.keep_high_precision_init_val(values)
    return quantized


@contextlib.contextmanager
def kept_attributes(parameters: dict[str, torch.nn.Parameter | None]) -> Iterator[None]:
    """Use around Module._apply. Module._apply replaces the contents of a quantized parameter by those of a new one,
    including attributes; a plain parameter keeps its attributes. This context restores the attributes that others have
    set (main_grad, initial values, hooks).

    parameters: the parameters of a module, by name.
    """
    hung = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, QuantizedTensor):
            stored = parameter.named()
            hung[name] = {key: value for key, value in vars(parameter).items() if key not in stored}
            hung[name].pop("_origin", None)  # the new one knows whether it has it
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hung[name][hooks] = getattr(parameter, hooks)
    try:
        yield
    finally:
        for name, attributes in hung.items():
            parameter = parameters[name]
            for key, value in attributes.items():
                # Hooks are there, and not called: PyTorch has to be told again.
                if key.endswith("_hooks") or key not in vars(parameter):
                    setattr(parameter, key, value)


def why_not_loaded(module: torch.nn.Module, name: str, value: torch.Tensor, assign: bool) -> str:
    """The reason why load_state_dict must not store a value as that weight of a module; "" if it may. Warns where a
    quantized value is quantized again."""
    weight, recipe = getattr(module, name), module.recipe
    if assign and module.gathering is not None:
        return (
            "assign=True would replace the parameter that quire.distributed.gather_codes has prepared; leave assign "
            "False, which copies the values"
        )
    if not isinstance(weight, QuantizedTensor):
        return ""
    if not isinstance(value, QuantizedTensor):
        # Without a recipe of its own the layer becomes an ordinary one. With one it would quantize what it was given.
        if recipe is None or not assign:
            return ""
        return (
            "the layer was converted for inference, and the state dict has values in high precision. If the layer was "
            "not converted in the model that was saved, do not convert it here either: quire.convert(..., tokens=None, "
            f"{SAME_LAYERS}). To quantize the values, leave assign False"
        )
    if same_codes(value.spec_text, weight.spec_text):
        return ""
    if assign and recipe is not None:
        return (
            f"the state dict has a weight that is quantized as {value.spec_text}, and the layer's recipe quantizes "
            f"weights as {recipe.weight_spec}; convert the model with the recipe of the model that was saved"
        )
    if not assign and not kept_directions(weight.spec, value):
        warnings.warn(
            f"load_state_dict: weights that are quantized as {value.spec_text} are decoded and quantized again as "
            f"{weight.spec_text}, which rounds twice; load values in high precision, or use the recipe of the model "
            "that was saved",
            stacklevel=2,
        )
    return ""


def weight_operand(
    weight: torch.Tensor, others: tuple[torch.Tensor | None, ...], recipe: Recipe
) -> tuple[torch.Tensor, Buffers]:
    """w and w_buffers for linear_prequantized or grouped_linear; (weight, ()) for a plain weight.

    others: the operator's other inputs that may need a gradient. Raises RuntimeError if the weight is quantized with
    another spec than the recipe's.
    """
    if not isinstance(weight, QuantizedTensor):
        return weight, ()
    if not same_codes(weight.spec_text, recipe.weight_spec):
        raise RuntimeError(
            f"Recipe mismatch for the weight: it is quantized as {weight.spec_text}, and the active recipe, "
            f"{type(recipe).__name__}, quantizes weights as {recipe.weight_spec}. If quire.convert "
            "has converted the model, leave quire.autocast, or convert the original model with this recipe. If it was "
            "made within quantized_model_init, use the recipe of that one, or construct the layer under this recipe "
            "and load its state dict"
        )
    wanted = any([tensor is not None and tensor.requires_grad for tensor in (weight, *others)])
    # Where nothing wants a gradient the call reaches the operator's kernel with its tensors, and that takes plain ones.
    buffers = weight.flat_buffers() if weight.stacked else weight.buffer_list()
    return weight if wanted and torch.is_grad_enabled() else weight.carrier(), buffers


# ------------------------------------------------------------ weights that hooks compute before every call


class Kind(NamedTuple):
    """A forward pre-hook that computes an attribute of a module. title: how it is called. attribute: of the hook, with
    the name of the tensor. value: what the tensor is in evaluation mode. sources: the endings of the parameters and
    buffers that it is computed from."""

    hook: type
    title: str
    attribute: str
    value: Callable[[Any, torch.nn.Module], torch.Tensor]
    sources: tuple[str, ...]


_KINDS = (
    Kind(BasePruningMethod, "prune", "_tensor_name", lambda hook, layer: hook.apply_mask(layer), ("_orig", "_mask")),
    Kind(WeightNorm, "weight_norm", "name", lambda hook, layer: hook.compute_weight(layer), ("_g", "_v")),
    Kind(
        SpectralNorm,
        "spectral_norm",
        "name",
        lambda hook, layer: hook.compute_weight(layer, do_power_iteration=False),
        ("_orig", "_u", "_v"),
    ),
)


def computing_hooks(layer: torch.nn.Module) -> list[tuple[str, Kind, Any]]:
    """Name of each tensor that a hook computes, and the hook."""
    return [
        (getattr(hook, kind.attribute), kind, hook)
        for hook in layer._forward_pre_hooks.values()
        for kind in _KINDS
        if isinstance(hook, kind.hook)
    ]


def compute_weights(layer: torch.nn.Module) -> None:
    """What a call of the layer would do first, for a module that reads its weights without calling it."""
    for _, _, hook in computing_hooks(layer):
        hook(layer, ())


def compute_weights_as_in_evaluation(layer: torch.nn.Module) -> None:
    """The same with the values of evaluation mode: a power iteration of spectral_norm changes its state."""
    for name, kind, hook in computing_hooks(layer):
        setattr(layer, name, kind.value(hook, layer))
