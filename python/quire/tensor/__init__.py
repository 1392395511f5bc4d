"""Quantized tensors as values: how (QuantSpec), what is stored (TensorProto), the tensors themselves (QuantizedTensor).

spec.py, buffers.py and proto.py describe, making.py makes tensors of buffers, quantized.py is the tensor, operators.py
says what PyTorch's operators do with one, views.py and directions.py which codes a view has and which follow from those
of the other direction; stack.py makes one tensor of several matrices (QuantizedStack); activation.py is the form that
has a gradient (QuantizedActivation), which used_as_tensor.py lets PyTorch take for a tensor; written.py puts values
into one; order.py moves codes between plain and interleaved order; pickled.py says what files hold.
"""

from quire.tensor.activation import QuantizedActivation, input_operand
from quire.tensor.buffers import BUFFER_NAMES, DTYPES, as_matrix, named_buffers
from quire.tensor.making import from_results
from quire.tensor.operators import QuantizedTensor
from quire.tensor.proto import TensorProto
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
