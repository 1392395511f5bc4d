"""transformer_engine.pytorch.ops: operations that a Sequential chains, composed of quire's layers. Nothing is fused
across operations; te.LayerNormLinear and te.LayerNormMLP quantize in the pass that computes the norm or the activation.
"""

from quire.te.names import message
from quire.te.ops.curves import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from quire.te.ops.layer_operations import BasicLinear, GroupedLinear, L2Normalization, LayerNorm, Linear, RMSNorm
from quire.te.ops.op_sequence import (
    FusedOperation,
    Sequential,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from quire.te.ops.operation import BasicOperation
from quire.te.ops.operation import Operation as FusibleOperation
from quire.te.ops.pointwise import (
    AddExtraInput,
    Bias,
    ConstantScale,
    Dropout,
    Identity,
    MakeExtraOutput,
    Quantize,
    Reshape,
)

__all__ = [
    "AddExtraInput",
    "BasicOperation",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "GEGLU",
    "GELU",
    "GLU",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "QGEGLU",
    "QGELU",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]


def __getattr__(name: str) -> object:
    raise AttributeError(message(name, "quire.te.ops"))
