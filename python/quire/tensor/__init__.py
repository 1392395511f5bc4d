"""Quantized tensors as values: how (QuantSpec), what is stored (TensorProto), the tensors themselves (QuantizedTensor).

spec.py says how a tensor is quantized, and buffers.py what is stored and how a tensor is made of it. quantized.py is
the tensor, and stack.py one tensor of several matrices. operators.py says what PyTorch's operators do with a tensor,
views of it included: decoded.py has views without codes, and writes.py the operators that write. activation.py is the
form that has a gradient. order.py moves codes between plain and interleaved order, and origin.py says which file a
tensor was read from.
"""

from quire.tensor.activation import QuantizedActivation, input_operand
from quire.tensor.buffers import BUFFER_NAMES, DTYPES, TensorProto, as_matrix, from_results, named_buffers
from quire.tensor.operators import QuantizedTensor
from quire.tensor.spec import QuantSpec
from quire.tensor.stack import QuantizedStack

__all__ = [
    "BUFFER_NAMES",
    "DTYPES",
    "QuantSpec",
    "QuantizedActivation",
    "QuantizedStack",
    "QuantizedTensor",
    "TensorProto",
    "as_matrix",
    "from_results",
    "input_operand",
    "named_buffers",
]
