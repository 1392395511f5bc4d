// Codes of a run of values, by the fastest instructions that give the bits of quire/format and quire/spec.
#pragma once

#include "quire/cuda/kernels/tiles.cuh"
#include "quire/spec/random.h"

namespace quire::cuda {

/// Two codes of 8 bits, the first one lower. The instructions equal encode_fast() for all floats.
template <Format kFormat>
__device__ uint32_t two_bytes(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t codes;
  if constexpr (kFormat == Format::e4m3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return encode_fast<kFormat>(low) | static_cast<uint32_t>(encode_fast<kFormat>(high)) << 8;
#endif
}

/// One code of 8 bits.
template <Format kFormat>
__device__ uint8_t one_byte(float x) {
#if __CUDA_ARCH__ >= 890
  return static_cast<uint8_t>(two_bytes<kFormat>(x, 0));
#else
  return encode_fast<kFormat>(x);
#endif
}

/// encode_stochastic() with integers: codes of E2M1 from 1 on are the upper bits of their values.
__device__ inline uint32_t stochastic_code(float x, uint32_t random) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const float magnitude = std::bit_cast<float>(u & 0x7FFFFFFFu), clamped = magnitude < 8.0f ? magnitude : 8.0f;
  const float step = clamped < 2.0f ? 0x1p-9f : clamped < 4.0f ? 0x1p-8f : 0x1p-7f;
  const float t = static_cast<float>(static_cast<int32_t>(random)) * step + clamped;
  const uint32_t code = t >= 1.0f ? (std::bit_cast<uint32_t>(t) >> 22) - 252u : t >= 0.5f ? 1u : 0u;
  const uint32_t most = static_cast<uint32_t>(row(kPackedFormat).max_code());
  const uint32_t with_sign = (code < most ? code : most) | u >> 31 << 3;
  return magnitude != magnitude ? static_cast<uint32_t>(row(kPackedFormat).nan_code()) : with_sign;
}

/// decode(encode(x)) of E2M1 for what is not NaN: adding a large number rounds to a multiple of the step, ties to even.
__device__ inline float rounded_to_e2m1(float x) {
  const float magnitude = fabsf(x), clamped = magnitude < 6.0f ? magnitude : 6.0f;
  const float large = clamped < 2.0f ? 0x1.8p22f : clamped < 4.0f ? 0x1.8p23f : 0x1.8p24f;
  return copysignf(clamped + large - large, x);
}

template <QuantSpec kSpec>
inline constexpr int kCodeWords = kRun / (kSpec.packed() ? 8 : 4);  ///< of a run

/// The codes of 16 values, the first one lowest.
template <QuantSpec kSpec>
__device__ std::array<uint32_t, kCodeWords<kSpec>> codes_of(const float (&x)[kRun],
                                                            const std::array<uint32_t, 4>& random) {
  std::array<uint32_t, kCodeWords<kSpec>> words{};
  QUIRE_UNROLL
  for (int i = 0; i < kRun; ++i) {
    if constexpr (!kSpec.packed()) {
      if (i % 2 == 0) words[i / 4] |= two_bytes<kSpec.element>(x[i], x[i + 1]) << i % 4 * 8;
    } else if constexpr (kSpec.stochastic) {
      words[i / 8] |= stochastic_code(x[i], random_byte(random, i)) << i % 8 * 4;
    } else {
      words[i / 8] |= static_cast<uint32_t>(encode_fast<kSpec.element>(x[i])) << i % 8 * 4;
    }
  }
  return words;
}

/// Writes the first `valid` codes of words, whole bytes; what is left of the last one is 0.
template <bool kPacked, size_t kCount>
__device__ void write_words(uint8_t* to, std::array<uint32_t, kCount> words, int64_t valid) {
  constexpr int64_t per_word = kPacked ? 8 : 4;
  if (valid >= static_cast<int64_t>(kCount) * per_word && reinterpret_cast<uintptr_t>(to) % (4 * kCount) == 0) {
    if constexpr (kCount == 1) *reinterpret_cast<uint32_t*>(to) = words[0];
    if constexpr (kCount == 2) *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    if constexpr (kCount == 4) *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    return;
  }
  QUIRE_UNROLL
  for (int i = 0; i < static_cast<int>(kCount) * 4; ++i) {
    const uint32_t byte = words[i / 4] >> i % 4 * 8 & 0xFFu;
    if (kPacked && 2 * i + 1 == valid) to[i] = static_cast<uint8_t>(byte & 0xFu);
    if ((kPacked ? 2 * i + 1 : i) < valid) to[i] = static_cast<uint8_t>(byte);
  }
}

}  // namespace quire::cuda
