"""Hugging Face peft: low-rank adapters on layers whose weights are quantized (docs/integrations.md)."""

from __future__ import annotations

from typing import Any

from quire.integrations import needed

#: The version that tests run with.
KNOWN = "0.21.2"


def prepare(config: Any) -> Any:
    """Prepares a peft.LoraConfig for layers of quire, in place, and returns it.

    Adapters train without it too. With it, merging an adapter into a quantized weight raises NotImplementedError,
    instead of rounding the sum to the weight's format; layers with plain weights merge as ever. Pass the result to
    peft.get_peft_model or model.add_adapter.

    Raises ImportError if peft is missing or cannot take layers of others; TypeError for another kind of configuration.
    """
    peft = needed("quire.integrations.peft.prepare", "peft", KNOWN)
    if not isinstance(config, peft.LoraConfig):
        raise TypeError(
            f"quire.integrations.peft.prepare: config must be a peft.LoraConfig, got {type(config).__name__}; only "
            "adapters of this kind are known to work"
        )
    if not hasattr(config, "_register_custom_module"):
        raise ImportError(
            f"quire.integrations.peft.prepare: peft {peft.__version__} has no LoraConfig._register_custom_module; use "
            f"peft {KNOWN}, and do not merge adapters into quantized weights without it"
        )
    from quire.integrations.adapters import AdaptedLinear
    from quire.nn.linear import Linear

    config._register_custom_module({Linear: AdaptedLinear})
    return config
