// The generic algorithms compiled against one vocabulary.
#include <immintrin.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

QUIRE_REGION_BEGIN("avx2,fma,f16c")

namespace quire::cpu::avx2 {
namespace {
#include "quire/cpu/simd/avx2.h"
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

}  // namespace quire::cpu::avx2

QUIRE_REGION_END
