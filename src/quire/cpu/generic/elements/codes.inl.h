// Codes in bytes: out of nibbles, decoded.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"

/// Codes, and lines of codes, that are handled together.
constexpr int64_t kLaneGroup = 16;

typedef uint8_t Codes __attribute__((vector_size(kLaneGroup), aligned(1)));

inline Codes load_codes(const uint8_t* p) { return *reinterpret_cast<const Codes*>(p); }
inline void store_codes(uint8_t* p, Codes v) { *reinterpret_cast<Codes*>(p) = v; }

/// Low bytes of the lanes.
inline void store_low(uint8_t* to, U32 v) {
  typedef uint8_t Low __attribute__((vector_size(kLanes), aligned(1)));
  *reinterpret_cast<Low*>(to) = __builtin_convertvector(v, Low);
}

/// `count` codes that start at an even element of a packed line.
inline void unpack_line(const uint8_t* packed, int64_t count, uint8_t* codes) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    const U16 pair = load_u8_words(packed + i / 2);
    const U16 apart = (pair | pair << 4) & 0x0F0F;
    std::memcpy(codes + i, &apart, sizeof apart);
  }
  for (; i < count; ++i) codes[i] = static_cast<uint8_t>(unpack(packed, i));
}

constexpr auto kPackedValues = [] {
  std::array<float, 16> values{};
  for (int code = 0; code < 16; ++code) values[static_cast<size_t>(code)] = quire::decode(kPackedFormat, code);
  return values;
}();

/// decode_fast() of every lane (NaN may carry another payload), in vector types because the compiler does not turn its
/// choices into lanes.
template <Format F>
F32 decode_lanes(U32 code) {
  constexpr FormatRow f = row(F);
  if constexpr (F == kPackedFormat && kLanes == 16) return __builtin_shuffle(load(kPackedValues.data()), code);
  const U32 sign = code >> (f.exp_bits + f.man_bits) << 31;
  if constexpr (F == kPackedFormat && kLanes == 8) {
    const F32 value = __builtin_shuffle(load(kPackedValues.data()), code);
    return reinterpret_cast<F32>(reinterpret_cast<U32>(value) | sign);
  }
  const U32 magnitude = code & static_cast<uint32_t>(f.magnitudes() - 1);
  const F32 tiny = __builtin_convertvector(reinterpret_cast<I32>(magnitude), F32) * quire::decode(f, 1);
  U32 bits = (magnitude << (23 - f.man_bits)) + (static_cast<uint32_t>(127 - f.bias) << 23);
  bits = magnitude < (1u << f.man_bits) ? reinterpret_cast<U32>(tiny) : bits;
  constexpr auto max_code = static_cast<uint32_t>(f.max_code());
  if constexpr (f.specials == Specials::nan_only) bits = magnitude > max_code ? ~U32{} : bits;
  if constexpr (f.specials == Specials::ieee) bits = magnitude > max_code ? bits | 0x7F800000u : bits;
  return reinterpret_cast<F32>(bits | sign);
}

/// decode() of kLanes codes, none of them an infinity or NaN. Codes of 8 bits become float16, whose exponents reach
/// below theirs: moved to where it has its exponent and fraction, they have the sign in every bit above.
template <Format F>
inline F32 decode_finite(const uint8_t* codes) {
  constexpr FormatRow f = row(F);
  constexpr int shift = 10 - f.man_bits;
  if constexpr (f.bits() != 8 || f.exp_bits > 5) return decode_lanes<F>(load_u8(codes));
  constexpr uint16_t kept = static_cast<uint16_t>(0x8000u | ((1u << (shift + 7)) - 1u));
  const F32 halves = load_bytes_as_f16<shift, kept>(codes);
  if constexpr (f.bias == 15) return halves;
  return halves * static_cast<float>(quire::power_of_two(15 - f.bias));
}

/// Whether all codes of a run, whole groups of N, are finite.
template <Format F, int64_t N>
inline bool all_finite(const uint8_t* codes, int64_t count) {
  typedef Vec<int8_t, N> Group;
  constexpr auto mask = static_cast<int8_t>(row(F).magnitudes() - 1);
  Group most{};
  for (int64_t i = 0; i < count; i += N) most = larger<Group>(most, *reinterpret_cast<const Group*>(codes + i) & mask);
  const Group beyond = most > static_cast<int8_t>(row(F).max_code());
  uint64_t bits[N / 8], found = 0;
  std::memcpy(bits, &beyond, sizeof bits);
  for (const uint64_t some : bits) found |= some;
  return found == 0;
}

template <Format F>
void decode_run(const uint8_t* codes, int64_t count, float* out) {
  if (all_finite<F, kLaneGroup>(codes, count)) {
    for (int64_t i = 0; i < count; i += kLanes) store(out + i, decode_finite<F>(codes + i));
  } else {
    for (int64_t i = 0; i < count; i += kLanes) store(out + i, decode_lanes<F>(load_u8(codes + i)));
  }
}

/// count is a multiple of 16.
inline void decode_codes(Format format, const uint8_t* codes, int64_t count, float* out) {
  with_element<kElements>(format, [&](auto f) { decode_run<f>(codes, count, out); });
}
