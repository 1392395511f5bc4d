"""TransformerEngine's numbers of element types."""

import enum


class DType(enum.IntEnum):
    """Element types by TransformerEngine's numbers (numerics.md 1.1-1.3 says what the formats are)."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


#: Of Format.HYBRID.
FP8, FP8_OF_GRADIENTS = DType.kFloat8E4M3, DType.kFloat8E5M2
