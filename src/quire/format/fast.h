// Branch-free conversions for kernels. Each is written so that a loop over it vectorises, and is tested against codec.h
// on every code and every halfway point.
#pragma once

#include <bit>
#include <cstdint>

#include "quire/format/format.h"

namespace quire {

/// encode() for signed element formats: round to nearest even, saturate, NaN to nan_code().
template <Format F>
constexpr uint8_t encode_fast(float x) {
  constexpr FormatRow f = row(F);
  constexpr int shift = 23 - f.man_bits;
  constexpr uint32_t rebias = static_cast<uint32_t>(127 - f.bias) << f.man_bits;
  constexpr uint32_t max_bits = (static_cast<uint32_t>(f.max_code()) + rebias) << shift;
  constexpr uint32_t min_normal = static_cast<uint32_t>(128 - f.bias) << 23;
  // Adding a number whose last place is the smallest subnormal makes the addition itself round (to nearest even).
  constexpr uint32_t magic = static_cast<uint32_t>(128 - f.bias + shift) << 23;
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t a = u & 0x7FFFFFFFu;
  const uint32_t m = a < max_bits ? a : max_bits;
  const uint32_t normal = ((m + ((1u << (shift - 1)) - 1u) + ((m >> shift) & 1u)) >> shift) - rebias;
  const uint32_t tiny = std::bit_cast<uint32_t>(std::bit_cast<float>(m) + std::bit_cast<float>(magic)) - magic;
  uint32_t code = m < min_normal ? tiny : normal;
  code |= (u >> 31) << (f.exp_bits + f.man_bits);
  return static_cast<uint8_t>(a > 0x7F800000u ? static_cast<uint32_t>(f.nan_code()) : code);
}

/// decode() for element formats. Bits of `code` above the format's are ignored.
template <Format F>
constexpr float decode_fast(uint32_t code) {
  constexpr FormatRow f = row(F);
  constexpr int shift = 23 - f.man_bits;
  constexpr uint32_t mask = static_cast<uint32_t>(f.magnitudes()) - 1u;
  constexpr float unit = std::bit_cast<float>(static_cast<uint32_t>(128 - f.bias - f.man_bits) << 23);
  const uint32_t magnitude = code & mask;
  const uint32_t sign = (code >> (f.exp_bits + f.man_bits) & 1u) << 31;
  // A subnormal is its mantissa, an integer, times the smallest step; that product is exact.
  const float tiny = static_cast<float>(static_cast<int32_t>(magnitude)) * unit;
  uint32_t bits = (magnitude << shift) + (static_cast<uint32_t>(127 - f.bias) << 23);
  bits = magnitude < (1u << f.man_bits) ? std::bit_cast<uint32_t>(tiny) : bits;
  if constexpr (f.specials != Specials::none) {
    const uint32_t special = f.specials == Specials::ieee && magnitude == static_cast<uint32_t>(f.max_code()) + 1u
                                 ? 0x7F800000u
                                 : 0x7FC00000u;
    bits = magnitude > static_cast<uint32_t>(f.max_code()) ? special : bits;
  }
  return std::bit_cast<float>(bits | sign);
}

}  // namespace quire
