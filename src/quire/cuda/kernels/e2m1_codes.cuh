// Codes of E2M1 of 16 values by few instructions, most of which are those of float32, of which a GPU executes twice as
// many as of the others: additions round, and leave a code in the last bits of their sums.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "quire/cuda/kernels/tiles.cuh"

namespace quire::cuda {

/// Nibbles of 16 codes, the first one lowest.
using Nibbles = std::array<uint32_t, kRun / 8>;

/// The signs of 16 values, each in the highest bit of its nibble.
__device__ inline Nibbles signs_of(const float (&x)[kRun]) {
  const auto highest_bytes = [&](int first) {  // of every second value
    const auto bits = [&](int i) { return std::bit_cast<uint32_t>(x[first + 2 * i]); };
    return __byte_perm(__byte_perm(bits(0), bits(1), 0x73), __byte_perm(bits(2), bits(3), 0x73), 0x5410);
  };
  Nibbles signs;
  QUIRE_UNROLL
  for (int w = 0; w < kRun / 8; ++w) {
    const uint32_t low = highest_bytes(8 * w) >> 4, high = highest_bytes(8 * w + 1);
    signs[w] = ((low & 0x0F0F0F0Fu) | (high & ~0x0F0F0F0Fu)) & 0x88888888u;
  }
  return signs;
}

/// 16 values of a line on their way to codes.
struct E2m1Run {
  float magnitudes[kRun];  ///< |value(i) * multiplier|, rounded once
  Nibbles signs;
  float most;  ///< at least the largest magnitude; NaN where one is

  template <class Value>
  __device__ E2m1Run(float multiplier, float largest, Value&& value) : most(largest * multiplier) {
    float x[kRun];
    QUIRE_UNROLL
    for (int i = 0; i < kRun; ++i) x[i] = value(i), magnitudes[i] = fabsf(x[i]) * multiplier;
    signs = signs_of(x);
  }

  /// Makes values whose codes the fast ways do not give such that they do: those beyond 6, and NaN, which is +6.
  __device__ void limit() {
    QUIRE_UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (magnitudes[i] != magnitudes[i]) signs[i / 8] &= ~(8u << i % 8 * 4);
      magnitudes[i] = fminf(magnitudes[i], 6.0f);
    }
  }
};

/// The code of a magnitude up to 6.5 is what this exceeds kCodeBase by. Let v be the magnitude. From 4 on, w is the
/// mean of v and 4, so that codes are one apart where w is; it is rounded up, which keeps it on its side of 4.5, where
/// the lower code is the even one. Then sums below 2^23 are multiples of 1/2, and those above are integers: codes below
/// and above v = 2 are as far apart.
inline constexpr uint32_t kCodeBase = 0x4AFFFFFCu;  ///< the bits of 2^23 - 2
__device__ inline uint32_t rounded_code(float v) {
  const float beyond4 = __saturatef(__fmaf_rn(v, 0.25f, -1.0f));
  const float w = __fmaf_ru(beyond4, -2.0f, v);
  return std::bit_cast<uint32_t>(w + std::bit_cast<float>(kCodeBase));
}

/// The codes of a run, rounded to nearest.
__device__ inline Nibbles rounded_codes(E2m1Run& run) {
  if (!(run.most <= 6.5f)) run.limit();
  Nibbles codes = run.signs;
  QUIRE_UNROLL
  for (int w = 0; w < kRun / 8; ++w) {
    uint32_t sum = 0u - kCodeBase * 0x11111111u;
    QUIRE_UNROLL
    for (int i = 0; i < 8; ++i) sum += rounded_code(run.magnitudes[8 * w + i]) << 4 * i;
    codes[w] |= sum;
  }
  return codes;
}

/// encode_stochastic() of a magnitude, in bits 22 to 24; those below have what rounding down drops. A number that is
/// subnormal has its code there. Products are exact, and the sum is rounded once, as there.
__device__ inline uint32_t stochastic_code(float magnitude, uint32_t random, int byte) {
  const float a = fminf(magnitude, 6.0f);  // beyond 6 all is 6, and so is NaN
  const float power = std::bit_cast<float>(std::bit_cast<uint32_t>(a) & 0x7F800000u), twice_step = fmaxf(power, 1.0f);
  // 2^14, whose last place is 2^-9, with the random byte in its last places.
  const float part = std::bit_cast<float>(__byte_perm(random, 0x46800000u, 0x7650u + byte)) - 0x1p14f;
  return std::bit_cast<uint32_t>(__fmul_rz(__fmaf_rn(part, twice_step, a), 0x1p-126f));
}

/// The codes of a run, rounded by the random words of its block.
__device__ inline Nibbles stochastic_codes(E2m1Run& run, const std::array<uint32_t, 4>& random) {
  if (run.most != run.most) run.limit();
  Nibbles codes = run.signs;
  QUIRE_UNROLL
  for (int w = 0; w < kRun / 8; ++w) {
    const auto code = [&](int i) { return stochastic_code(run.magnitudes[8 * w + i], random[2 * w + i / 4], i % 4); };
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i) {
      // Two codes, in bits 6 to 8 of the halves of a word.
      const uint32_t two = __byte_perm(code(i), code(i + 4), 0x7632);
      const int left = 4 * i - 6;
      codes[w] |= (left < 0 ? two >> -left : two << left) & 0x00070007u << 4 * i;
    }
  }
  return codes;
}

}  // namespace quire::cuda
