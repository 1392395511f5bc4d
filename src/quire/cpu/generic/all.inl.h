// All algorithms. Included once per instruction set, after its vocabulary and within its region and namespace: so are
// the fragments that a fragment includes.
#include "quire/cpu/generic/gemm/column_sum.inl.h"
#include "quire/cpu/generic/gemm/f32_microkernel.inl.h"
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/matmul.inl.h"
#include "quire/cpu/generic/pointwise/activation.inl.h"
#include "quire/cpu/generic/pointwise/norm.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/dequantize.inl.h"
#include "quire/cpu/generic/quantize/fingerprint.inl.h"
#include "quire/cpu/generic/quantize/quantize.inl.h"
