// Codes to bfloat16 by tables of words. Codes that differ in their power of two only have products with a scale that
// differ in nothing else, so that a few products, rounded, give all of them.
#pragma once

#include "quire/cpu/generic/elements/codes.inl.h"
#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/quantize_rows.inl.h"

/// Whether a vector holds the words of such a table; or tables are of 16 bytes, of which an instruction looks up many.
constexpr bool kHasWordTables = kLanes == 16, kHasByteTables = kLanes == 8;

/// Whether codes of 8 bits have such tables: every fraction is in the first quarter of the codes, or eighth.
constexpr bool has_tables(Format f) {
  return row(f).bits() == 8 && ((kHasWordTables && row(f).man_bits <= 4) || (kHasByteTables && row(f).man_bits <= 3));
}

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

template <Format F>
inline void look_up(const ByteProducts& table, const uint8_t* codes, U16 (&to)[2]) {
  for (int h = 0; h < 2; ++h) to[h] = look_up(table, load_u8_words(codes + h * 2 * kLanes));
}

/// The bytes of the magnitudes of the first 16 codes times a scale, among which every fraction is.
struct FirstProducts {
  Bytes low, high;
};
template <Format F>
alignas(64) constexpr std::array<float, 16> kFirstValues = [] {
  std::array<float, 16> values{};
  for (int i = 0; i < 16; ++i) values[static_cast<size_t>(i)] = quire::decode(F, i);
  return values;
}();

template <Format F>
inline FirstProducts first_products(float scale) {
  typedef Vec<uint16_t, 16> Words;
  alignas(64) uint16_t words[16];
  for (int i = 0; i < 16; i += 2 * kLanes) {
    const F32 *values = reinterpret_cast<const F32*>(kFirstValues<F>.data() + i), s = broadcast(scale);
    store_as<DType::bf16, Known::no_nan>(words + i, values[0] * s, values[1] * s);
  }
  const Words all = *reinterpret_cast<const Words*>(words);
  alignas(16) uint8_t low[16], high[16];
  store_codes(low, __builtin_convertvector(all, Codes));
  store_codes(high, __builtin_convertvector(all >> 8, Codes));
  return {repeat_table(low), repeat_table(high)};
}

/// Codes, eight by eight in the order in which byte_pairs() takes them.
template <int... I>
inline Bytes load_for_pairs(const uint8_t* codes, std::integer_sequence<int, I...>) {
  typedef Vec<uint64_t, kLanes / 2> Eights;
  const Eights eights = *reinterpret_cast<const Eights*>(codes);
  return reinterpret_cast<Bytes>(__builtin_shufflevector(eights, eights, (I / 2 + I % 2 * kLanes / 4)...));
}

/// Bytes of a, each below one of b, of the first halves of groups of 16 or of the second ones.
template <int kHalf, int... I>
inline U16 byte_pairs(Bytes a, Bytes b, std::integer_sequence<int, I...>) {
  return reinterpret_cast<U16>(
      __builtin_shufflevector(a, b, (I / 16 * 16 + kHalf * 8 + I % 16 / 2 + I % 2 * 4 * kLanes)...));
}

/// A code's product is that of the one of the same fraction among the first 16, and their difference in the exponent.
template <Format F>
inline void look_up(const FirstProducts& table, const uint8_t* codes, U16 (&to)[2]) {
  constexpr auto lanes = std::make_integer_sequence<int, 4 * kLanes>();
  constexpr uint8_t least_normal = 1 << row(F).man_bits, fraction = least_normal - 1;
  const Bytes code = load_for_pairs(codes, std::make_integer_sequence<int, kLanes / 2>());
  const Bytes magnitude = code & 0x7F, first = smaller(magnitude, (magnitude & fraction) | least_normal);
  const Bytes low = look_up(table.low, first), high = look_up(table.high, first) | (code & 0x80);
  const Bytes powers = magnitude - first, zero{};
  to[0] = byte_pairs<0>(low, high, lanes) + (byte_pairs<0>(powers, zero, lanes) << (7 - row(F).man_bits));
  to[1] = byte_pairs<1>(low, high, lanes) + (byte_pairs<1>(powers, zero, lanes) << (7 - row(F).man_bits));
}

/// bfloat16 of finite codes of 8 bits, whole quads, times the moderate scales of their blocks of N.
template <Format F, int64_t N>
inline void decode_bytes(const uint8_t* codes, int64_t count, const float* scale, const Sink<uint16_t>& out) {
  const auto products = [](float s) {
    if constexpr (kHasWordTables)
      return byte_products<F>(s);
    else
      return first_products<F>(s);
  };
  float table_scale = scale[0];
  auto table = products(table_scale);
  for (int64_t block = 0; block < count; block += N) {
    if (block > 0 && scale[block / N] != table_scale) table = products(table_scale = scale[block / N]);
    for (int64_t i = block; i < std::min(block + N, count); i += kQuad) {
      alignas(64) U16 quad[2];
      ask_ahead(codes + i);
      look_up<F>(table, codes + i, quad);
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
