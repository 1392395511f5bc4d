// The generic algorithms compiled against one vocabulary.
#include "quire/cpu/generic/includes.h"

namespace quire::cpu::scalar {
namespace {
#include "quire/cpu/simd/scalar.h"
// The algorithms speak the vocabulary above.
#include "quire/cpu/generic/amax.inl.h"
#include "quire/cpu/generic/codes.inl.h"
#include "quire/cpu/generic/column_sum.inl.h"
#include "quire/cpu/generic/dequantize.inl.h"
#include "quire/cpu/generic/gemm.inl.h"
#include "quire/cpu/generic/lines.inl.h"
#include "quire/cpu/generic/microkernel.inl.h"
#include "quire/cpu/generic/nvfp4.inl.h"
#include "quire/cpu/generic/pack.inl.h"
#include "quire/cpu/generic/plain.inl.h"
#include "quire/cpu/generic/quantize.inl.h"
}  // namespace

const Kernels kKernels{quantize, dequantize, gemm, column_sum};

}  // namespace quire::cpu::scalar
