// The product in lanes of bfloat16.
#include <arm_neon.h>

#include "quire/cpu/generic/includes.h"
#include "quire/cpu/region.h"

QUIRE_REGION_BEGIN("arch=armv8.2-a+dotprod+bf16")

namespace quire::cpu::neon_bf16 {
namespace {
#include "quire/cpu/simd/neon.h"
//
#include "quire/cpu/simd/neon_dot.h"
//
#include "quire/cpu/simd/neon_bf16.h"

// The algorithm speaks the vocabulary above.
#include "quire/cpu/generic/gemm/bf16_microkernel.inl.h"
#include "quire/cpu/generic/gemm/gemm.inl.h"
}  // namespace

const GemmKernel kBf16 = multiply_matrix<Bf16MicroKernel<kWideTile>>;

}  // namespace quire::cpu::neon_bf16

QUIRE_REGION_END
