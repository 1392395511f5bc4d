"""Attributes that TransformerEngine's scripts read of quantized tensors.

A quantized tensor has one class, whoever made it, so no subclass can have them: importing quire.te adds them. None is
there before, so nothing is replaced.
"""

from quire.te.quantizers import quantizer_of
from quire.tensor import QuantizedActivation, QuantizedStack, QuantizedTensor


def add_names() -> None:
    for kind in (QuantizedTensor, QuantizedActivation):
        kind.quantizer = property(quantizer_of)
    # Those of a GroupedTensor, for the quantized single parameters of layers. Plain ones stay plain parameters.
    QuantizedStack.num_tensors = property(lambda self: self.shape[0])
    QuantizedStack.quantized_tensors = property(QuantizedStack.parts)
    QuantizedStack.split_into_quantized_tensors = QuantizedStack.parts
