// The product in lanes of int8, without VNNI.
#include <immintrin.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

// g++ 12: its own AVX-512 headers trip this warning.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

QUIRE_REGION_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")

namespace quire::cpu::avx512_int8 {
namespace {
#include "quire/cpu/simd/avx512.h"
//
#include "quire/cpu/simd/avx512_int8.h"

// The algorithm speaks the vocabulary above.
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/int8_microkernel.inl.h"
}  // namespace

const GemmKernel kInt8 = multiply_matrix_of_any_height<multiply_matrix_of_shape<Int8MicroKernel, kInt8Tile>>;

}  // namespace quire::cpu::avx512_int8

QUIRE_REGION_END
