// The product in lanes of bfloat16.
#include <immintrin.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

// g++ 12: its own AVX-512 headers trip this warning.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

QUIRE_REGION_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16")

namespace quire::cpu::avx512_bf16 {
namespace {
#include "quire/cpu/simd/avx512.h"
//
#include "quire/cpu/simd/avx512_vnni.h"
//
#include "quire/cpu/simd/avx512_bf16.h"

// The algorithm speaks the vocabulary above.
#include "quire/cpu/generic/gemm/bf16_microkernel.inl.h"
#include "quire/cpu/generic/gemm/gemm.inl.h"
}  // namespace

const GemmKernel kBf16 = multiply_matrix_of_shape<Bf16MicroKernel, kWideTile>;

}  // namespace quire::cpu::avx512_bf16

QUIRE_REGION_END
