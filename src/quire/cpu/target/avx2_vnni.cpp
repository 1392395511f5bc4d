// The product in lanes of int8.
#include <immintrin.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

QUIRE_REGION_BEGIN("avx2,fma,f16c,avxvnni")

namespace quire::cpu::avx2_vnni {
namespace {
#include "quire/cpu/simd/avx2.h"
//
#include "quire/cpu/simd/avx2_vnni.h"

// The algorithm speaks the vocabulary above.
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/int8_microkernel.inl.h"
}  // namespace

const GemmKernel kInt8 = multiply_matrix_of_any_height<multiply_matrix<Int8MicroKernel<kInt8Tile>>>;

}  // namespace quire::cpu::avx2_vnni

QUIRE_REGION_END
