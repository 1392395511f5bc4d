"""The layer of peft that holds a quire.Linear and its low-rank adapters."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import Linear as LoraLinear

from quire.tensor import QuantizedTensor


class AdaptedLinear(LoraLinear):
    """peft's layer, which does not merge an adapter into a quantized weight."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """As in peft. Raises NotImplementedError for a quantized weight, with nothing changed."""
        weight = self.get_base_layer().weight
        if isinstance(weight, QuantizedTensor):
            raise NotImplementedError(
                f"quire.integrations.peft: the weight is quantized as {weight.spec_text}, and a sum with an adapter "
                "would be rounded to it; keep the adapter beside the weight, or call quire.dequantize_weights(model) "
                "(model.dequantize() if from_pretrained has loaded quantized weights) and merge then"
            )
        super().merge(*args, **kwargs)
