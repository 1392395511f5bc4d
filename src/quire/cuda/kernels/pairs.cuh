// Two numbers of 16 bits in a word.
#pragma once

#include <cstdint>

#include "quire/base/dtype.h"

namespace quire::cuda {

/// Two numbers in one dtype of 16 bits, each rounded once to nearest: the first one in the lower half.
template <DType kDType>
__device__ uint32_t pair_of(float first, float second) {
  uint32_t both;
  if constexpr (kDType == DType::bf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

}  // namespace quire::cuda
