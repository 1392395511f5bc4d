// The product in lanes of int8.
#include <arm_neon.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

QUIRE_REGION_BEGIN("arch=armv8.2-a+dotprod")

namespace quire::cpu::neon_dot {
namespace {
#include "quire/cpu/simd/neon.h"
//
#include "quire/cpu/simd/neon_dot.h"

// The algorithm speaks the vocabulary above.
#include "quire/cpu/generic/gemm/gemm.inl.h"
#include "quire/cpu/generic/gemm/int8_microkernel.inl.h"
}  // namespace

const GemmKernel kInt8 = multiply_matrix<Int8MicroKernel<kInt8Tile>>;

}  // namespace quire::cpu::neon_dot

QUIRE_REGION_END
