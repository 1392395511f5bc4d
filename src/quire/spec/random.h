// Random bits of stochastic rounding, and the rounding itself (numerics.md 5.6, 0.11).
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "quire/format/fast.h"

namespace quire {

/// All 64 bits of a product. nvcc multiplies numbers of 64 bits in more instructions, even where they are small.
constexpr uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

/// Philox4x32-10 (Salmon et al., SC 2011): key = seed, counter = (offset, block), low words first.
constexpr std::array<uint32_t, 4> philox(uint64_t seed, uint64_t offset, uint64_t block) {
  std::array<uint32_t, 4> c{static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32),
                            static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32)};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = wide_product(0xD2511F53u, c[0]), p1 = wide_product(0xCD9E8D57u, c[2]);
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

/// The random byte of element i (0..15) of a block whose draw is `words`.
constexpr uint8_t random_byte(const std::array<uint32_t, 4>& words, int i) {
  return static_cast<uint8_t>(words[static_cast<size_t>(i / 4)] >> (i % 4 * 8));
}

/// Code of x in kPackedFormat, rounded up with a probability of (distance from the grid point below) / step, in
/// 1/256ths.
constexpr uint8_t encode_stochastic(float x, uint8_t random) {
  // 0.5, 1 or 2 by arithmetic: a chain of choices would keep the loop from vectorising.
  const auto step_at = [](float a) { return 0.5f + (a < 2.0f ? 0.0f : 0.5f) + (a < 4.0f ? 0.0f : 1.0f); };
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const float a = std::bit_cast<float>(u & 0x7FFFFFFFu);
  // Beyond 6 everything saturates; clamping first also keeps the integer conversion below defined.
  const float clamped = a < 8.0f ? a : 8.0f;
  // The contract's fma: random / 256 * step is exact, so multiply and add round just once.
  const float t = static_cast<float>(static_cast<int32_t>(random)) * 0x1p-8f * step_at(clamped) + clamped;
  const float step = step_at(t);
  const float down = static_cast<float>(static_cast<int32_t>(t / step)) * step;
  const uint32_t code = encode_fast<kPackedFormat>(down < 6.0f ? down : 6.0f) | (u >> 31) << 3;
  return static_cast<uint8_t>(a != a ? static_cast<uint32_t>(row(kPackedFormat).nan_code()) : code);
}

}  // namespace quire
