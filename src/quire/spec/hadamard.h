// The 16-point random Hadamard transform in the order that makes it exact everywhere (numerics.md 0.10, 5.3).
#pragma once

#include <array>
#include <cstdint>

#include "quire/base/host_device.h"

namespace quire {

inline constexpr int64_t kHadamardSize = 16;
/// Bit i set: input i is negated.
inline constexpr uint32_t kHadamardSigns = 0xD7E8u;

/// In place, float32, not yet rounded to bfloat16. T is float or a vector of floats (one transform per lane).
template <class T>
constexpr void hadamard16(T (&v)[16], bool signs) {
  // Unrolled, so that v stays in registers.
  QUIRE_UNROLL
  for (unsigned i = 0; i < 16; ++i) v[i] = v[i] * (signs && (kHadamardSigns >> i & 1u) ? -0.25f : 0.25f);
  QUIRE_UNROLL
  for (unsigned stride = 1; stride < 16; stride *= 2) {
    QUIRE_UNROLL
    for (unsigned i = 0; i < 16; ++i)
      if (!(i & stride)) {
        const T a = v[i], b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
  }
  // A zero sum is +0 whatever the signs of its terms.
  QUIRE_UNROLL
  for (T& x : v) x = x + 0.0f;
}

}  // namespace quire
