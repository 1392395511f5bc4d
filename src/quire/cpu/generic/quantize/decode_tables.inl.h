// Codes to bfloat16 by tables of words. Codes that differ in their power of two only have products with a scale that
// differ in nothing else, so that a few products, rounded, give all of them.
#pragma once

#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/quantize_rows.inl.h"

/// Whether a vector holds the words of such a table.
constexpr bool kHasWordTables = kLanes == 16;

/// Whether no product of any code and one of the scales is subnormal or overflows.
inline bool all_are_moderate(const float* scale, int64_t count) {
  constexpr uint32_t least = std::bit_cast<uint32_t>(0x1p-100f), most = std::bit_cast<uint32_t>(0x1p100f);
  const auto reaches = [](auto bits) { return bits - least >= most - least; };
  I32 beyond{};
  bool rest = false;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) beyond |= reaches(bits_of(load(scale + i)));
  for (; i < count; ++i) rest |= reaches(std::bit_cast<uint32_t>(scale[i]));
  return !rest && largest<int32_t, kLanes>(-beyond) == 0;
}

template <int... I>
inline U16 odd_words(U32 first, U32 second, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(reinterpret_cast<U16>(first), reinterpret_cast<U16>(second), (2 * I + 1)...);
}
/// Two vectors rounded to bfloat16.
inline U16 rounded_words(F32 first, F32 second) {
  return odd_words(rounded_to_bf16<false>(first), rounded_to_bf16<false>(second),
                   std::make_integer_sequence<int, 2 * kLanes>());
}

/// Magnitudes of codes of 8 bits times a scale: a quarter of the codes each.
struct ByteProducts {
  U16 part[4];
};

/// Whether products of a quarter of the codes give all others: every fraction of normal numbers is among the first 32.
constexpr bool has_quarters(Format f) { return row(f).bits() == 8 && row(f).man_bits <= 4; }

/// Where the table's second quarter finds codes of the same fractions in the first, behind the subnormal ones, and how
/// many powers of two lie between.
template <Format F>
struct QuarterRule {
  float value[32];
  uint16_t place[32], offset[32];
};
template <Format F>
alignas(64) constexpr QuarterRule<F> kQuarterRule = [] {
  constexpr int subnormal = 1 << row(F).man_bits;
  QuarterRule<F> rule{};
  for (int i = 0; i < 32; ++i) {
    const int place = std::max(i, i % subnormal + subnormal), powers = (32 + i - place) >> row(F).man_bits;
    rule.value[i] = quire::decode(F, i);
    rule.place[i] = static_cast<uint16_t>(place);
    rule.offset[i] = static_cast<uint16_t>(powers << 7);
  }
  return rule;
}();

inline U16 load_words(const uint16_t* p) { return *reinterpret_cast<const U16*>(p); }

template <Format F>
inline ByteProducts byte_products(float scale) {
  constexpr uint16_t quarter = (32 >> row(F).man_bits) << 7;
  const QuarterRule<F>& rule = kQuarterRule<F>;
  const F32 s = broadcast(scale);
  const U16 first = rounded_words(load(rule.value) * s, load(rule.value + kLanes) * s);
  const U16 second = __builtin_shuffle(first, load_words(rule.place)) + load_words(rule.offset);
  return {{first, second, second + quarter, second + static_cast<uint16_t>(2 * quarter)}};
}

inline U16 look_up(const ByteProducts& table, U16 code) {
  const auto& [first, second, third, fourth] = table.part;
  const U16 low = __builtin_shuffle(first, second, code), high = __builtin_shuffle(third, fourth, code);
  const U16 magnitude = (code & 64) != 0 ? high : low;
  const U32 sign = reinterpret_cast<U32>(code << 8);
  return reinterpret_cast<U16>(blend_bits(0x80008000u, sign, reinterpret_cast<U32>(magnitude)));
}

/// bfloat16 of finite codes of 8 bits, whole quads, times the moderate scales of their blocks of N.
template <Format F, int64_t N>
inline void decode_bytes(const uint8_t* codes, int64_t count, const float* scale, const Sink<uint16_t>& out) {
  float table_scale = scale[0];
  ByteProducts table = byte_products<F>(table_scale);
  for (int64_t block = 0; block < count; block += N) {
    if (block > 0 && scale[block / N] != table_scale) table = byte_products<F>(table_scale = scale[block / N]);
    for (int64_t i = block; i < std::min(block + N, count); i += kQuad) {
      alignas(64) U16 quad[2];
      ask_ahead(codes + i);
      for (int64_t h = 0; h < 2; ++h) quad[h] = look_up(table, load_u8_words(codes + i + h * 2 * kLanes));
      out.put(i, reinterpret_cast<const uint16_t*>(quad));
    }
  }
}

/// How the products of packed codes with two scales follow from the scales and 1.5 times these, which are rounded
/// words: which of the words it is for each code, no bits of it if the code is a zero, and then its power of two and
/// its sign.
template <int64_t N>
struct NibbleRule {
  uint16_t word[32], kept[32], offset[32];
};
template <int64_t N>
alignas(64) constexpr NibbleRule<N> kNibbleRule = [] {
  NibbleRule<N> rule{};
  for (int i = 0; i < 32; ++i) {
    const bool zero = (i & 7) == 0;
    const uint32_t bits = std::bit_cast<uint32_t>(quire::decode(kPackedFormat, i % 16));
    rule.word[i] = static_cast<uint16_t>((N == 16 ? i / 16 * 2 : 0) + ((bits & 0x400000u) != 0));
    rule.kept[i] = zero ? 0 : 0xFFFF;
    rule.offset[i] = static_cast<uint16_t>((bits >> 16 & 0xFF80u) - (zero ? 0u : 127u << 7));
  }
  return rule;
}();

/// bfloat16 of packed codes of 4 bits, whole quads, times the moderate scales of their blocks of N.
template <int64_t N>
inline void decode_nibbles(const uint8_t* packed, int64_t count, const float* scale, const Sink<uint16_t>& out) {
  // What two blocks of 16 need is a word of 64 bits, what one of 32 does is half of that.
  using Broadcast = std::conditional_t<N == 16, uint64_t, uint32_t>;
  alignas(64) uint32_t pairs[kPieceOfLine / N + kLanes];
  for (int64_t i = 0; i < count / N; i += kLanes) {
    const F32 s = load(scale + i);
    *reinterpret_cast<U32*>(pairs + i) =
        blend_bits(0xFFFFu, rounded_to_bf16<false>(s) >> 16, rounded_to_bf16<false>(s * 1.5f));
  }
  const NibbleRule<N>& rule = kNibbleRule<N>;
  const U16 word = load_words(rule.word), kept = load_words(rule.kept), offset = load_words(rule.offset);
  U32 second{};
  for (int i = kLanes / 2; i < kLanes; ++i) second[i] = 0x00100010u;
  for (int64_t i = 0; i < count; i += kQuad) {
    alignas(64) U16 quad[2];
    ask_ahead(packed + i / 2);
    for (int64_t h = 0; h < 2; ++h) {
      const int64_t at = i + h * 2 * kLanes;
      Broadcast pair;
      std::memcpy(&pair, pairs + at / N, sizeof pair);
      const U16 words = reinterpret_cast<U16>(Vec<Broadcast, 4 * kLanes / sizeof(Broadcast)>{} + pair);
      const U16 table = (__builtin_shuffle(words, word) & kept) + offset;
      const U32 byte = load_u8(packed + at / 2);
      quad[h] = __builtin_shuffle(table, reinterpret_cast<U16>(((byte | byte << 12) & 0x000F000Fu) | second));
    }
    out.put(i, reinterpret_cast<const uint16_t*>(quad));
  }
}
