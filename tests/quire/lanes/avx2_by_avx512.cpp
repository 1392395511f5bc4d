// The product in int8 lanes of AVX2, compiled for machines with AVX-512 VNNI, which has its instruction under another
// name: so it is tested where AVX-VNNI itself is missing.
#if defined(__x86_64__)
#include <immintrin.h>

#include "lanes.h"
#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

QUIRE_REGION_BEGIN("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")

namespace quire::cpu::avx2_by_avx512 {
namespace {
#include "quire/cpu/simd/avx2.h"
//
#include "quire/cpu/simd/avx2_vnni.h"

#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/int8_microkernel.inl.h"
}  // namespace

const GemmKernel kInt8 = multiply_matrix<Int8MicroKernel<kInt8Tile>>;

}  // namespace quire::cpu::avx2_by_avx512

QUIRE_REGION_END
#endif
