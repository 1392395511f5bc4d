"""transformer_engine.pytorch.quantization: autocast, what it has set (FP8GlobalStateManager), which recipes a device
has, and the recipes of transformer_engine.common."""

import functools

import torch

from quire.autocast import active_recipe, active_rule, check_flags
from quire.autocast import autocast as own
from quire.nn.weight import quantized_model_init
from quire.recipe import Recipe as ImmutableRecipe
from quire.recipe import from_name
from quire.te.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from quire.te.layers import KEYS
from quire.te.names import message
from quire.te.quantizer_roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]


def __getattr__(name: str) -> object:
    raise AttributeError(message(name))


class autocast(own):
    """quire.autocast, which also takes _graph=False."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: ImmutableRecipe | Recipe | str | None = None,
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
    fp8_recipe: ImmutableRecipe | Recipe | str | None = None,
    fp8_group: object = None,
    _graph: bool = False,
) -> autocast:
    """quire.autocast under its older name, with the older names of its arguments."""
    check_flags("te.fp8_autocast", "fp8_recipe", enabled=enabled, calibrating=calibrating)
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
    """Whether layers train with per-tensor FP8 on a device (None: PyTorch's default one), found out by trying it once
    in each process. With return_reason also the reason why not, "" if they do."""
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


def check_fp8_support() -> tuple[bool, str]:
    """is_fp8_available(return_reason=True), under its older name."""
    return is_fp8_available(return_reason=True)


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """is_fp8_block_scaling_available(return_reason=True), under its older name."""
    return is_fp8_block_scaling_available(return_reason=True)


def check_mxfp8_support() -> tuple[bool, str]:
    """is_mxfp8_available(return_reason=True), under its older name."""
    return is_mxfp8_available(return_reason=True)


def check_nvfp4_support() -> tuple[bool, str]:
    """is_nvfp4_available(return_reason=True), under its older name."""
    return is_nvfp4_available(return_reason=True)


class _WithoutState(type):
    def __getattr__(cls, name: str) -> object:
        raise AttributeError(
            f"FP8GlobalStateManager.{name} is not available: quire has no global state. Use quire.active_recipe() for "
            "what autocast has set, quire.delayed_state(model) for scales and amax histories"
        )


class FP8GlobalStateManager(metaclass=_WithoutState):
    """Answers questions about the innermost autocast of this thread. It has no state: layers own their scales and
    histories, and autocast restores what was active before."""

    @staticmethod
    def reset() -> None:
        """Does nothing: outside of an autocast nothing is left to reset. Raises RuntimeError inside an enabled
        autocast, which only its end can end."""
        if active_recipe() is not None:
            raise RuntimeError(
                "FP8GlobalStateManager.reset: an autocast is active, and only leaving it ends it; call reset() outside "
                "of the `with` block"
            )

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """The key in fp8_meta of a layer."""
        return KEYS[bool(forward)]

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether layers quantize here."""
        return active_recipe() is not None

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Whether layers collect amaxes and compute in high precision: autocast(enabled=False, calibrating=True) with a
        delayed recipe."""
        return active_recipe() is None and active_rule() is not None

    @staticmethod
    def get_fp8_recipe() -> ImmutableRecipe | Recipe:
        """The active recipe, the object that autocast was given; get_default_recipe() if none is active."""
        recipe = active_recipe()
        return get_default_recipe() if recipe is None else getattr(recipe, "settable", recipe)

    @staticmethod
    def get_fp8_group() -> object:
        """The group over which the active recipe, if it is delayed, reduces amaxes; else None. None is also the default
        group."""
        rule = active_rule()
        return None if rule is None else rule.group

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        """Whether layers train with per-tensor FP8 on PyTorch's default device, and why not, "" if they do."""
        return is_fp8_available(return_reason=True)

    @staticmethod
    def is_mxfp8_available() -> tuple[bool, str]:
        """Whether layers train with MXFP8BlockScaling, and why not, "" if they do."""
        return is_mxfp8_available(return_reason=True)

    @staticmethod
    def is_fp8_block_scaling_available() -> tuple[bool, str]:
        """Whether layers train with Float8BlockScaling, and why not, "" if they do."""
        return is_fp8_block_scaling_available(return_reason=True)

    @staticmethod
    def is_nvfp4_available() -> tuple[bool, str]:
        """Whether layers train with NVFP4BlockScaling, and why not, "" if they do."""
        return is_nvfp4_available(return_reason=True)


def get_align_size_for_quantization(recipe: ImmutableRecipe | Recipe) -> int:
    """The multiple that TransformerEngine's kernels need each expert's number of rows to be under a recipe. quire's
    products take any number. For a CustomRecipe it is its quantization_alignment.

    Raises TypeError if recipe is no recipe.
    """
    if not isinstance(recipe, ImmutableRecipe | Recipe):
        raise TypeError(
            "quire.te.get_align_size_for_quantization: recipe must be a recipe, such as MXFP8BlockScaling(), got "
            f"{recipe!r}"
        )
    if recipe.custom():
        return recipe.quantization_alignment
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16
