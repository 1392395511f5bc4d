// Codes of a run of values, by the fastest instructions that give the bits of quire/format and quire/spec.
#pragma once

#include "quire/cuda/kernels/e2m1_codes.cuh"
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

/// decode(encode(x)) of E2M1 for what is not NaN: adding a large number rounds to a multiple of the step, ties to even.
__device__ inline float rounded_to_e2m1(float x) {
  const float magnitude = fabsf(x), clamped = magnitude < 6.0f ? magnitude : 6.0f;
  const float large = clamped < 2.0f ? 0x1.8p22f : clamped < 4.0f ? 0x1.8p23f : 0x1.8p24f;
  return copysignf(clamped + large - large, x);
}

/// 16 values of a line on their way to codes of 8 bits.
struct ByteRun {
  float v[kRun];

  template <class Value>
  __device__ ByteRun(float multiplier, float, Value&& value) {
    QUIRE_UNROLL
    for (int i = 0; i < kRun; ++i) v[i] = value(i) * multiplier;
  }
};
/// Made from a multiplier, the largest magnitude, which is NaN where a value is, and value(i).
template <QuantSpec kSpec>
using ScaledRun = std::conditional_t<kSpec.packed(), E2m1Run, ByteRun>;

template <QuantSpec kSpec>
inline constexpr int kCodeWords = kRun / (kSpec.packed() ? 8 : 4);  ///< of a run

/// The codes of 16 values, the first one lowest.
template <QuantSpec kSpec>
__device__ std::array<uint32_t, kCodeWords<kSpec>> codes_of(ScaledRun<kSpec>& run,
                                                            const std::array<uint32_t, 4>& random) {
  if constexpr (kSpec.stochastic) {
    return stochastic_codes(run, random);
  } else if constexpr (kSpec.packed()) {
    return rounded_codes(run);
  } else {
    std::array<uint32_t, kCodeWords<kSpec>> words{};
    QUIRE_UNROLL
    for (int i = 0; i < kRun; i += 2) words[i / 4] |= two_bytes<kSpec.element>(run.v[i], run.v[i + 1]) << i % 4 * 8;
    return words;
  }
}

/// Writes the first `valid` codes of words, whole bytes; what is left of the last one is 0.
template <bool kPacked, size_t kCount>
__device__ void write_words(uint8_t* to, std::array<uint32_t, kCount> words, int valid) {
  constexpr int per_word = kPacked ? 8 : 4;
  if (valid >= static_cast<int>(kCount) * per_word && reinterpret_cast<uintptr_t>(to) % (4 * kCount) == 0) {
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
