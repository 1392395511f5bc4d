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

/// Codes of bfloat16 under the multipliers of those in the low halves of lanes and of those in the upper ones. Without
/// kNan none is NaN.
template <bool kNan>
inline U16 encode_packed_words(U16 x, F32 even, F32 odd) {
  const U32 lanes = reinterpret_cast<U32>(x);
  const U16 magnitude = low_halves(packed_magnitudes(float_of(lanes << 16) * even),
                                   packed_magnitudes(float_of(lanes & 0xFFFF0000u) * odd));
  const U16 code = magnitude | (x >> 12 & 8);
  if constexpr (!kNan) return code;
  // The product of infinity and 0 is NaN too, whose code has no sign.
  const U16 zero = reinterpret_cast<U16>(
      blend_bits(0xFFFFu, reinterpret_cast<U32>(even == F32{}), reinterpret_cast<U32>(odd == F32{})));
  const U16 infinite = reinterpret_cast<U16>((x & 0x7FFF) == 0x7F80),
            nan = reinterpret_cast<U16>((x & 0x7FFF) > 0x7F80);
  const U16 lost = nan | (infinite & zero);
  return (code & ~lost) | (lost & 7);
}

/// The numbers of the blocks of n elements that the lanes of encode_packed_words() belong to, from a first one on.
template <int... I>
constexpr I32 numbers_of_blocks(int first, int64_t n, std::integer_sequence<int, I...>) {
  return I32{(first + 2 * I / static_cast<int>(n))...};
}

/// Codes of bfloat16 that are handled at once.
constexpr int64_t kPackedGroup = 8 * kLanes;

/// Two codes per byte of x times the multiplier of its block of N elements, whole groups. Multipliers are read up to a
/// whole vector.
template <bool kNan, int64_t N>
inline void encode_packed_line(const uint16_t* x, const float* multiplier, int64_t count, uint8_t* to) {
  constexpr int64_t width = 2 * kLanes;
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  for (int64_t i = 0; i < count; i += kPackedGroup) {
    U32 bytes[4];
    for (int64_t j = 0; j < kPackedGroup; j += 32) ask_ahead(reinterpret_cast<const uint8_t*>(x + i + j));
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const int64_t at = i + q * width;
      F32 m;
      if constexpr (N >= width)
        m = broadcast(multiplier[at / N]);
      else
        m = __builtin_shuffle(load(multiplier + i / N), numbers_of_blocks(q * static_cast<int>(width / N), N, lanes));
      bytes[q] = join_nibbles(encode_packed_words<kNan>(*reinterpret_cast<const U16*>(x + at), m, m));
    }
    store_u8(to + i / 2, bytes);
  }
}

/// Words of the codes of 8 rows, 2 kLanes of them, under the multipliers of columns.
template <bool kNan>
inline void encode_packed_down(const uint16_t* x, int64_t stride, const float* multiplier, uint32_t* words) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  const F32 first = load(multiplier), second = load(multiplier + kLanes);
  const F32 even = every_second<0>(first, second, lanes), odd = every_second<1>(first, second, lanes);
  U16 half[2];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    half[h] = U16{};
#pragma GCC unroll 4
    for (int i = 3; i >= 0; --i)
      half[h] =
          half[h] << 4 | encode_packed_words<kNan>(*reinterpret_cast<const U16*>(x + (4 * h + i) * stride), even, odd);
  }
  const U32 low = reinterpret_cast<U32>(half[0]), high = reinterpret_cast<U32>(half[1]);
  const U32 evens = reinterpret_cast<U32>(low_halves(low, high)), odds = blend_bits(0xFFFFu, low >> 16, high);
  *reinterpret_cast<U32*>(words) = interleaved_parts<kLanes, 0>(evens, odds, lanes);
  *reinterpret_cast<U32*>(words + kLanes) = interleaved_parts<kLanes, kLanes / 2>(evens, odds, lanes);
}
