// Codes of finite bfloat16 numbers, whose words are the lanes: twice as many as there are floats in a vector.
#pragma once

#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"

/// Magnitudes and signs of a quad.
struct WordQuad {
  U16 first, second;                      ///< with signs
  U16 first_magnitude, second_magnitude;  ///< without

  explicit WordQuad(const uint16_t* x)
      : first(*reinterpret_cast<const U16*>(x)),
        second(*reinterpret_cast<const U16*>(x + 2 * kLanes)),
        first_magnitude(first & 0x7FFFu),
        second_magnitude(second & 0x7FFFu) {}

  /// Stores codes of the magnitudes, with the signs.
  template <Format F>
  void store(Bytes codes, uint8_t* to) const {
    store_bytes_of_words(to, codes | code_signs<F>(upper_bytes(first, second)));
  }
};

/// Multipliers above 0 of the words in lower and in upper halves of lanes. Words above the limit need not be
/// multiplied: it has the largest code too.
struct Factor {
  F32 even, odd;
  U16 limit;
};

/// Limits under multipliers, in both halves of each lane.
template <Format F>
inline U32 word_limits(F32 multiplier) {
  const U32 limit = bits_of(largest(F) / multiplier) >> 16, finite = U32{} + 0x7F7Fu;
  const U32 least = limit < finite ? limit : finite;
  return least | least << 16;
}

/// Codes of magnitudes times a multiplier.
template <Format F>
inline U16 encode_products(U16 magnitude, const Factor& by) {
  const U32 pairs = reinterpret_cast<U32>(smaller(magnitude, by.limit));
  const U32 even = encode_magnitudes<F>(float_of(pairs << 16) * by.even);
  const U32 odd = encode_magnitudes<F>(float_of(pairs & 0xFFFF0000u) * by.odd);
  return low_halves(even, odd) & static_cast<uint16_t>(row(F).magnitudes() - 1);
}

/// Stores the codes of a quad.
template <Format F>
inline void encode_words(const uint16_t* x, const Factor& first, const Factor& second, uint8_t* codes) {
  const WordQuad v(x);
  const U16 low = encode_products<F>(v.first_magnitude, first);
  v.store<F>(low_bytes(low, encode_products<F>(v.second_magnitude, second)), codes);
}

/// A power of two changes only the exponent of a number. So the code of a product is the exponent and the fraction,
/// rounded as one integer, if the number is normal and the code is too.
template <Format F>
struct PowerRule {
  static constexpr FormatRow f = row(F);
  static constexpr int shift = 7 - f.man_bits;
  static constexpr auto largest_word = static_cast<uint16_t>(f.max_code() << shift);
  static constexpr auto almost_half = static_cast<uint16_t>((1 << (shift - 1)) - 1);
  static constexpr auto least_normal = static_cast<uint8_t>(1 << f.man_bits);
  /// The limit under a multiplier without exponent.
  static constexpr uint32_t most = (static_cast<uint32_t>(254 - f.bias) << 7) + largest_word;
  static_assert(most >= (255u << 7), "limits are normal");

  /// word_limits() of normal powers of two. The multiplier 2^-127 of E8M0 is that of an infinite amax.
  static U32 limits(F32 multiplier) {
    const U32 limit = most - (bits_of(multiplier) >> 16);
    return limit | limit << 16;
  }

  /// Codes that are normal or of 0. The word's last place that stays rounds ties to even.
  static U16 round(U16 word, U16 magnitude, U16 limit) {
    return (excess(magnitude, limit - static_cast<uint16_t>(largest_word + almost_half)) + (word >> shift & 1)) >>
           shift;
  }

  /// Stores the codes of a quad and returns true, or returns false: where a number is not 0 but its code is less than
  /// normal. This includes every number whose own exponent is 0.
  static bool encode(const uint16_t* x, U16 first_limit, U16 second_limit, uint8_t* codes) {
    const WordQuad v(x);
    const U16 first = round(v.first, v.first_magnitude, first_limit);
    const U16 second = round(v.second, v.second_magnitude, second_limit);
    const Bytes code = smaller(low_bytes(first, second), Bytes{} + static_cast<uint8_t>(f.max_code()));
    const Bytes wanted = smaller(low_bytes(v.first_magnitude, v.second_magnitude), Bytes{} + least_normal);
    if (any(reinterpret_cast<U32>(excess(wanted, code)))) return false;
    v.store<F>(code, codes);
    return true;
  }
};

/// Whether all multipliers are powers of two.
inline bool are_powers(const float* multiplier, int64_t count) {
  uint32_t fractions = 0;
  for (int64_t i = 0; i < count; ++i) fractions |= std::bit_cast<uint32_t>(multiplier[i]) & 0x7FFFFFu;
  return fractions == 0;
}

/// Limits under multipliers that are powers of two, or that need not be.
template <Format F>
inline U32 word_limits(F32 multiplier, bool powers) {
  return powers ? PowerRule<F>::limits(multiplier) : word_limits<F>(multiplier);
}

/// Multipliers and limits of blocks of N elements, or of all if N is 0.
template <int64_t N>
struct BlockFactors {
  static_assert(N % (2 * kLanes) == 0);
  /// Whether both halves of a quad have the same.
  static constexpr bool kAlike = N == 0 || N % kQuad == 0;

  const float* multiplier;
  const uint32_t* limits;

  /// Of the words from `at` on.
  U16 limit(int64_t at) const { return reinterpret_cast<U16>(U32{} + limits[block(at)]); }
  Factor factor(int64_t at) const {
    const F32 m = broadcast(multiplier[block(at)]);
    return {m, m, limit(at)};
  }
  static int64_t block(int64_t at) { return N == 0 ? 0 : at / std::max(N, int64_t{1}); }
};

/// encode_line() of finite numbers.
template <Format F, bool kPowers, class Factors>
inline void encode_line_of_words(const uint16_t* x, const Factors& by, int64_t count, const Sink<uint8_t>& out) {
  constexpr int64_t second = Factors::kAlike ? 0 : kQuad / 2;
  int64_t begin = 0;
  if constexpr (kPowers)
    begin = encode_quads(x, {0, count}, out, [&](int64_t at, uint8_t* codes) {
      return PowerRule<F>::encode(x + at, by.limit(at), by.limit(at + second), codes);
    });
  // Where one code is subnormal, others often are.
  encode_quads(x, {begin, count}, out, [&](int64_t at, uint8_t* codes) {
    encode_words<F>(x + at, by.factor(at), by.factor(at + second), codes);
    return true;
  });
}
