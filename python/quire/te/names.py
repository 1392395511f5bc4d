"""Other words for quire's own."""

import functools
from collections.abc import Callable

import torch

from quire.autocast import autocast as own
from quire.nn import recompute
from quire.nn.weight import quantized_model_init
from quire.recipe import Recipe, from_name
from quire.te.common.recipe import MXFP8BlockScaling
from quire.te.common.recipe import Recipe as SettableRecipe

_OF_CHECKPOINT = {"distribute_saved_activations": False, "get_rng_state_tracker": None, "tp_group": None}


@functools.wraps(recompute.checkpoint)
def checkpoint(function: Callable[..., object], *args: object, use_reentrant: bool = False, **kwargs: object) -> object:
    for name, nothing in _OF_CHECKPOINT.items():
        if kwargs.pop(name, nothing) != nothing:
            raise NotImplementedError(
                f"quire.checkpoint: {name} is not available in this version; leave it {nothing!r}"
            )
    return recompute.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


class autocast(own):
    """quire.autocast, which also takes _graph=False."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | SettableRecipe | str | None = None,
        amax_reduction_group: object = None,
        _graph: bool = False,
        **unknown: object,
    ) -> None:
        if _graph is not False:
            raise NotImplementedError(
                f"autocast: _graph={_graph!r} is what TransformerEngine sets while it captures CUDA graphs; leave it "
                "False"
            )
        super().__init__(enabled, calibrating, recipe, amax_reduction_group, **unknown)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | SettableRecipe | str | None = None,
    fp8_group: object = None,
    _graph: bool = False,
) -> autocast:
    """quire.autocast under its older name, with the older names of its arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


#: quire.quantized_model_init under its older name.
fp8_model_init = quantized_model_init


def get_default_recipe() -> MXFP8BlockScaling:
    """quire.recipe.default(), as a recipe whose fields can be set."""
    return MXFP8BlockScaling()


@functools.cache
def _reason(recipe: str | None, device: str) -> str:
    from quire.info import why_not  # later than quire, or `python -m quire.info` would find itself imported

    return why_not(None if recipe is None else from_name(recipe), device)


def _available(recipe: str | None, return_reason: bool, device: torch.device | str | None) -> bool | tuple[bool, str]:
    reason = _reason(recipe, str(torch.get_default_device() if device is None else torch.device(device)))
    return (not reason, reason) if return_reason else not reason


def is_fp8_available(return_reason: bool = False, device: torch.device | str | None = None) -> bool | tuple[bool, str]:
    """Whether layers train with per-tensor FP8 on a device (None: PyTorch's default one), found out by trying it, once
    a process; with return_reason also why not, "" if they do."""
    return _available("fp8_current", return_reason, device)


def is_bf16_available(return_reason: bool = False, device: torch.device | str | None = None) -> bool | tuple[bool, str]:
    """is_fp8_available() for layers in bfloat16 that do not quantize."""
    return _available(None, return_reason, device)


def is_fp8_block_scaling_available(
    return_reason: bool = False, device: torch.device | str | None = None
) -> bool | tuple[bool, str]:
    """is_fp8_available() for Float8BlockScaling."""
    return _available("fp8_block", return_reason, device)


def is_mxfp8_available(
    return_reason: bool = False, device: torch.device | str | None = None
) -> bool | tuple[bool, str]:
    """is_fp8_available() for MXFP8BlockScaling."""
    return _available("mxfp8", return_reason, device)


def is_nvfp4_available(
    return_reason: bool = False, device: torch.device | str | None = None
) -> bool | tuple[bool, str]:
    """is_fp8_available() for NVFP4BlockScaling."""
    return _available("nvfp4", return_reason, device)
