// The generic algorithms compiled against one vocabulary.
#include <immintrin.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

// g++ 12: its own AVX-512 headers trip this warning.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

QUIRE_REGION_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")

namespace quire::cpu::avx512 {
namespace {
#include "quire/cpu/simd/avx512.h"

// The algorithms speak the vocabulary above.
#include "quire/cpu/generic/all.inl.h"
}  // namespace

const Kernels kKernels{quantize,   dequantize,      multiply_matrix_f32, column_sum, norm,  norm_grad,
                       activation, activation_grad, fingerprint,         amax,       matmul};

}  // namespace quire::cpu::avx512

QUIRE_REGION_END
