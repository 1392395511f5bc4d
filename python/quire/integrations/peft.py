"""Hugging Face peft: low-rank adapters on layers whose weights are quantized (docs/integrations.md)."""

from __future__ import annotations

from typing import Any

from quire.integrations import needed

#: The version that tests run with.
KNOWN = "0.21.2"


def prepare(config: Any) -> Any:
    """Returns a peft.LoraConfig as it is.

    It checks that merging an adapter into a quantized weight raises NotImplementedError, instead of rounding the sum to
    the weight's format. `import quire` and `import peft` see to that, in either order, so no call of it is needed.
    Layers with plain weights merge as ever.

    Raises ImportError if peft is missing or merges in another way; TypeError for another kind of configuration.
    """
    peft = needed("quire.integrations.peft.prepare", "peft", KNOWN)
    if not isinstance(config, peft.LoraConfig):
        raise TypeError(
            f"quire.integrations.peft.prepare: config must be a peft.LoraConfig, got {type(config).__name__}; only "
            "adapters of this kind are known to work"
        )
    from quire.integrations.adapters import is_guarded

    layers = needed("quire.integrations.peft.prepare", "peft.tuners.lora.layer", KNOWN)
    if not is_guarded(layers):
        raise ImportError(
            f"quire.integrations.peft.prepare: peft {peft.__version__} merges in a way that quire does not know; use "
            f"peft {KNOWN}, and do not merge adapters into quantized weights without it"
        )
    return config
