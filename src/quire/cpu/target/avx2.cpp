// The generic algorithms compiled against one vocabulary.
#include <immintrin.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

QUIRE_REGION_BEGIN("avx2,fma,f16c")

namespace quire::cpu::avx2 {
namespace {
#include "quire/cpu/simd/avx2.h"

// The algorithms speak the vocabulary above.
#include "quire/cpu/generic/all.inl.h"
}  // namespace

const Kernels kKernels{quantize,   dequantize,      multiply_matrix_f32, column_sum, norm,  norm_grad,
                       activation, activation_grad, fingerprint,         amax,       matmul};

}  // namespace quire::cpu::avx2

QUIRE_REGION_END
