"""What autocast has set, under the names of TransformerEngine's global state."""

from quire.autocast import active_recipe, active_rule
from quire.recipe import Recipe
from quire.te.common.recipe import Recipe as SettableRecipe
from quire.te.fp8_meta import KEYS
from quire.te.names import (
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)


class _WithoutState(type):
    def __getattr__(cls, name: str) -> object:
        raise AttributeError(
            f"FP8GlobalStateManager.{name} is not available: quire has no global state. Use quire.active_recipe() for "
            "what autocast has set, quire.delayed_state(model) for scales and amax histories"
        )


class FP8GlobalStateManager(metaclass=_WithoutState):
    """Answers about the innermost autocast of this thread. There is no state behind it: layers own their scales and
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
    def get_fp8_recipe() -> Recipe | SettableRecipe:
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
