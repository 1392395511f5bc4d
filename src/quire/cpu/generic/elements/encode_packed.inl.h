// Codes of 4 bits, E2M1, of vectors of f32.
#pragma once

#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"

/// What rounds a magnitude up to 6 by one addition, found by its integer part (halved, if there are fewer lanes than
/// integers): 2^22 times its power of two, at least 1, so that the sum has its last place where the code has its own;
/// and in the last places what the exponent adds to the code. So the low half of the sum is the code.
constexpr auto kPackedRounders = [] {
  constexpr FormatRow f = row(kPackedFormat);
  static_assert(f.bias == 1 && f.man_bits == 1 && largest(kPackedFormat) < 8);
  std::array<float, kLanes> rounders{};
  for (int i = 0; i < std::min(kLanes, 8); ++i) {
    const int whole = kLanes < 8 ? 2 * i : i, exponent = whole < 2 ? 0 : whole < 4 ? 1 : 2;
    rounders[static_cast<size_t>(i)] = std::bit_cast<float>(((127 + 22 + exponent) << 23) + 2 * exponent);
  }
  return rounders;
}();

/// Codes of magnitudes in the low halves of lanes, with something else in the upper ones.
inline U32 packed_magnitudes(F32 x) {
  const F32 a = limited_magnitude(x, largest(kPackedFormat));
  I32 whole = __builtin_convertvector(a, I32);
  if constexpr (kLanes < 8) whole = whole >> 1;
  return bits_of(a + __builtin_shuffle(load(kPackedRounders.data()), whole));
}

/// encode() of every lane. Without kNan no lane is NaN.
template <bool kNan>
inline U32 encode_packed_lanes(F32 x) {
  const U32 code = blend_bits(7, packed_magnitudes(x), bits_of(x) >> 28);
  if constexpr (!kNan) return code;
  return x != x ? U32{} + 7u : code;
}
