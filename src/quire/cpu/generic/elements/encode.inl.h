// Codes of vectors of f32.
#pragma once

#include "quire/cpu/generic/elements/encode_packed.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"

/// Magnitudes on a format's grid: `sum` - `rounder`, exactly.
struct Rounded {
  F32 sum, rounder;
};

/// Rounds magnitudes up to the largest of the format by one addition: the sum with a number 2^(23 - man_bits) times as
/// large as the magnitude's power of two has its last place where the code has its own. Of the sum's bits the exponent,
/// shifted, and the last places add up to the code; the rounder's own last places, even so that ties stay ties to even,
/// make the constant part a multiple of 2^(code bits).
template <Format F>
inline Rounded round_magnitudes(F32 a) {
  constexpr FormatRow f = row(F);
  constexpr int shift = 23 - f.man_bits;
  constexpr auto least_normal = static_cast<int32_t>(128 - f.bias) << 23;
  constexpr auto mask = static_cast<uint32_t>(f.magnitudes() - 1);
  constexpr uint32_t last = (0u - static_cast<uint32_t>((128 - f.bias + shift) << f.man_bits)) & mask;
  static_assert(last % 2 == 0);
  // Times a power of two it is the rounder exactly, so that the sum is rounded once whether it is fused or not.
  constexpr float factor = std::bit_cast<float>(static_cast<uint32_t>(127 + shift) << 23 | last);
  const F32 power = reinterpret_cast<F32>(larger(reinterpret_cast<I32>(a) & 0x7F800000, I32{} + least_normal));
  return {multiply_add(power, broadcast(factor), a), power * factor};
}

/// Codes of magnitudes up to the largest of the format, with other bits above them.
template <Format F>
inline U32 encode_magnitudes(F32 a) {
  const U32 sum = bits_of(round_magnitudes<F>(a).sum);
  return sum + (sum >> (23 - row(F).man_bits));
}

/// encode() of every lane. Without kNan no lane is NaN.
template <Format F, bool kNan>
inline U32 encode_lanes(F32 x) {
  if constexpr (F == kPackedFormat) return encode_packed_lanes<kNan>(x);
  constexpr FormatRow f = row(F);
  constexpr auto mask = static_cast<uint32_t>(f.magnitudes() - 1);
  const U32 sign = reinterpret_cast<U32>(x) >> (31 - f.exp_bits - f.man_bits);
  const U32 code = blend_bits(mask, encode_magnitudes<F>(limited_magnitude(x, largest(F))), sign);
  if constexpr (!kNan) return code;
  return x != x ? U32{} + static_cast<uint32_t>(f.nan_code()) : code;
}

/// Elements whose codes are stored together.
constexpr int64_t kQuad = 4 * kLanes;

/// Results from which on caches are bypassed: by then their beginning would have left them anyway, and a line that is
/// written whole need not be read first.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

/// Copies finished bytes to where they belong.
inline void put(const uint8_t* from, int64_t count, uint8_t* to, bool stream) {
  if (!stream) return void(std::memcpy(to, from, static_cast<size_t>(count)));
  const int64_t head = std::min<int64_t>(count, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 63u));
  if (head > 0) std::memcpy(to, from, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + 64 <= count; i += 64) stream_64(to + i, from + i);
  if (i < count) std::memcpy(to + i, from + i, static_cast<size_t>(count - i));
}

/// Where a line of results goes, a quad at a time: to any memory, or past the caches to memory on a boundary of 64
/// bytes.
template <class T>
struct Sink {
  T* to;
  bool streams;
  bool asks = false;  ///< whether the elements that are encoded are asked for ahead

  void put(int64_t at, const T* quad) const {
    constexpr int64_t bytes = kQuad * static_cast<int64_t>(sizeof(T));
    const auto* from = reinterpret_cast<const uint8_t*>(quad);
    if (bytes % 64 != 0 || !streams) return void(std::memcpy(to + at, from, static_cast<size_t>(bytes)));
#pragma GCC unroll 4
    for (int64_t i = 0; i < bytes / 64; ++i) stream_64(reinterpret_cast<uint8_t*>(to + at) + 64 * i, from + 64 * i);
  }
};

/// Signs where codes have them, from bytes that have them in their top bits.
template <Format F>
inline Bytes code_signs(Bytes upper) {
  return reinterpret_cast<Bytes>(reinterpret_cast<U16>(upper & 0x80) >> (8 - row(F).bits()));
}

/// Stores the codes of four vectors. Without kNan no lane is NaN.
template <Format F, bool kNan>
inline void encode_quad(const F32 (&v)[4], uint8_t* codes) {
  U32 code[4];
  if constexpr (kNan || row(F).packed()) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) code[q] = encode_lanes<F, kNan>(v[q]);
    return store_u8(codes, code);
  }
  // Signs of four vectors at once.
  U32 bits[4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    bits[q] = bits_of(v[q]);
    code[q] =
        encode_magnitudes<F>(limited_magnitude(v[q], largest(F))) & static_cast<uint32_t>(row(F).magnitudes() - 1);
  }
  store_bytes_of_lanes(codes, low_bytes(code) | code_signs<F>(upper_bytes(bits)));
}

/// Calls encode(at, codes) for the quads in a range of a line, until it returns false; returns where it did, or the
/// end.
template <class T, class Encode>
inline int64_t encode_quads(const T* x, std::array<int64_t, 2> range, const Sink<uint8_t>& out, const Encode& encode) {
  constexpr int64_t bytes = kQuad * static_cast<int64_t>(sizeof(T));
  int64_t at = range[0];
  for (; at < range[1]; at += kQuad) {
    alignas(64) uint8_t codes[kQuad];
    for (int64_t j = 0; out.asks && j < bytes; j += 64) ask_ahead(reinterpret_cast<const uint8_t*>(x + at) + j);
    if (!encode(at, codes)) break;
    out.put(at, codes);
  }
  return at;
}

/// Codes of x times the multiplier of its block of N elements, or times the first one if N is 0; one per byte, whole
/// quads.
template <Format F, bool kNan, int64_t N, DType D>
inline void encode_line(const Plain<D>* x, const float* multiplier, int64_t count, const Sink<uint8_t>& out) {
  encode_quads(x, {0, count}, out, [&](int64_t at, uint8_t* codes) {
    F32 v[4];
    load_as<D>(x + at, v);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const int64_t block = N == 0 ? 0 : (at + q * kLanes) / std::max(N, int64_t{1});
      v[q] = v[q] * broadcast(multiplier[block]);
    }
    encode_quad<F, kNan>(v, codes);
    return true;
  });
}

/// Two codes per byte, whole quads. A code past an odd end is that of +0.
inline void pack_codes(const uint8_t* codes, int64_t count, uint8_t* to) {
  typedef Vec<uint16_t, kQuad / 2> Pairs;
  for (int64_t i = 0; i < count; i += kQuad) {
    const Pairs pairs = *reinterpret_cast<const Pairs*>(codes + i);
    typedef Vec<uint8_t, kQuad / 2> Packed;
    *reinterpret_cast<Packed*>(to + i / 2) = __builtin_convertvector(pairs | pairs >> 4, Packed);
  }
}
