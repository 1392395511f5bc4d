// The product in lanes of int8, without VNNI.
#include <immintrin.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

QUIRE_REGION_BEGIN("avx2,fma,f16c")

namespace quire::cpu::avx2_int8 {
namespace {
#include "quire/cpu/simd/avx2.h"
//
#include "quire/cpu/simd/avx2_int8.h"

// The algorithm speaks the vocabulary above.
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/int8_microkernel.inl.h"
}  // namespace

const GemmKernel kInt8 = multiply_matrix_of_any_height<multiply_matrix<Int8MicroKernel<kInt8Tile>>>;

}  // namespace quire::cpu::avx2_int8

QUIRE_REGION_END
