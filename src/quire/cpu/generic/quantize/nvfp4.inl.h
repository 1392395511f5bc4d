// What only NVFP4 does to a block: its scale under a global amax, four-over-six, stochastic rounding.
#pragma once

#include "quire/cpu/generic/elements/encode.inl.h"
#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"

constexpr int64_t kNvfp4Block = 16;

struct Nvfp4Scale {
  uint8_t byte;
  float value;
  float multiplier;
};

/// `wanted`: the block scale before it is rounded to E4M3.
inline Nvfp4Scale nvfp4_scale(float wanted, const GlobalScale& g) {
  const uint8_t byte = encode_fast<kBlockScaleFormat>(wanted);
  const float value = decode_fast<kBlockScaleFormat>(byte);
  return {byte, value, nvfp4_multiplier(value, g)};
}

/// Error of one block's values under a candidate scale, summed in order (numerics.md 5.8, 5.11, 0.5). g: what is
/// stored.
template <bool kSquared, Global kGlobal>
[[gnu::flatten]] float four_over_six_error(float divisor, const float* values, const Nvfp4Scale& scale, float g) {
  float terms[kNvfp4Block];
  [[maybe_unused]] const float whole = kGlobal == Global::multiplier ? scale.value * g : scale.value / g;
  for (int64_t j = 0; j < kNvfp4Block; ++j) {
    const float decoded = decode_fast<kPackedFormat>(encode_fast<kPackedFormat>(values[j] * scale.multiplier));
    const float d = (kGlobal == Global::amax ? decoded * scale.value * g / divisor : decoded * whole) - values[j];
    terms[j] = kSquared ? d * d : std::fabs(d);
  }
  float sum = 0;
  for (const float term : terms) sum += term;
  return sum;
}

using FourOverSixError = float (*)(float divisor, const float* values, const Nvfp4Scale&, float g);

inline FourOverSixError four_over_six_error_of(const QuantSpec& spec) {
  const auto of_global = [&]<bool kSquared>() -> FourOverSixError {
    if (spec.global == Global::amax) return four_over_six_error<kSquared, Global::amax>;
    return spec.global == Global::multiplier ? four_over_six_error<kSquared, Global::multiplier>
                                             : four_over_six_error<kSquared, Global::divisor>;
  };
  const bool squared = spec.four_over_six == FourOverSix::mse;
  return squared ? of_global.template operator()<true>() : of_global.template operator()<false>();
}

/// Errors of the lines of a tile, added as a tree (numerics.md 5.8).
inline float tree_sum(float (&errors)[kNvfp4Block]) {
  for (int64_t offset = kNvfp4Block / 2; offset > 0; offset /= 2)
    for (int64_t i = 0; i < offset; ++i) errors[i] += errors[i + offset];
  return errors[0];
}

/// The better of the two scales of a block, which is `count` lines (one, or those of a 16x16 tile) kLineStride apart.
inline Nvfp4Scale four_over_six_scale(const QuantSpec& spec, const float* values, int64_t count, float amax,
                                      const GlobalScale& g) {
  constexpr float kMax = largest(kBlockScaleFormat);
  const float base = amax / 6.0f * g.encode;
  const Nvfp4Scale four = nvfp4_scale(std::min(base * 1.5f, kMax), g), six = nvfp4_scale(std::min(base, kMax), g);
  const float divisor = 6.0f * spec.block_scale_max();
  // Chosen once: where the choice was made in the loop, g++ 12.2 took it out of the loops around this function, and,
  // for AVX2, what they store with it.
  const FourOverSixError error = four_over_six_error_of(spec);
  float error_four[kNvfp4Block] = {}, error_six[kNvfp4Block] = {};
  for (int64_t i = 0; i < count; ++i) {
    error_four[i] = error(divisor, values + i * kLineStride, four, g.stored);
    error_six[i] = error(divisor, values + i * kLineStride, six, g.stored);
  }
  return tree_sum(error_four) < tree_sum(error_six) ? four : six;
}

/// encode_stochastic() of every lane (numerics.md 5.6), `random` below 256. Without kNan no lane is NaN.
template <bool kNan>
inline U32 encode_stochastic_lanes(F32 x, U32 random) {
  constexpr int32_t half = 0x3F000000, one = 0x3F800000;
  // The grid's step is half of the power of two of a, at least 0.5; beyond 8 it does not matter, as 6 is the largest.
  const F32 a = limited_magnitude(x, 8.0f);
  const I32 power = larger(reinterpret_cast<I32>(a), I32{} + one) & 0x7F800000;
  const F32 step_256th = reinterpret_cast<F32>(power - (9 << 23));
  const F32 up = a + __builtin_convertvector(reinterpret_cast<I32>(random), F32) * step_256th;
  // Rounded down: the exponent and one bit of the fraction, below 1 whether it is 0.5 or more.
  const I32 t = reinterpret_cast<I32>(limited_magnitude(up, 6.0f));
  const I32 index = larger((t >> 22) - 252, (t >= half) & 1);
  const U32 code = reinterpret_cast<U32>(index) | (bits_of(x) >> 28 & 8u);
  if constexpr (!kNan) return code;
  return x != x ? U32{} + 7u : code;
}

/// Seed and offset of stochastic rounding.
struct Draw {
  uint64_t seed, offset;
};

/// Random bits of blocks, as many vectors of them as hide the latency of multiplications: word j of vector i, in the
/// low halves of its lanes.
constexpr int64_t kStreams = 4;
struct RandomWords {
  U64 word[4][kStreams];
};

inline U64 low_half(uint64_t x) { return U64{} + (x & 0xFFFFFFFFu); }

/// philox() of every lane's block.
inline RandomWords philox_lanes(const Draw& draw, const U64 (&block)[kStreams]) {
  RandomWords r;
  for (int64_t i = 0; i < kStreams; ++i) {
    r.word[0][i] = low_half(draw.offset);
    r.word[1][i] = low_half(draw.offset >> 32);
    r.word[2][i] = block[i];
    r.word[3][i] = block[i] >> 32;
  }
  auto k0 = static_cast<uint32_t>(draw.seed), k1 = static_cast<uint32_t>(draw.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const U64 key0 = low_half(k0), key1 = low_half(k1);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kStreams; ++i) {
      const U64 p0 = multiply_low(r.word[0][i], low_half(0xD2511F53u));
      const U64 p1 = multiply_low(r.word[2][i], low_half(0xCD9E8D57u));
      r.word[0][i] = (p1 >> 32) ^ r.word[1][i] ^ key0;
      r.word[2][i] = (p0 >> 32) ^ r.word[3][i] ^ key1;
      r.word[1][i] = p1;
      r.word[3][i] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return r;
}

constexpr int64_t kDraws = kLanes / 2;

template <int... I>
inline U64 interleaved(U64 a, U64 b, int64_t first, std::integer_sequence<int, I...>) {
  const U64 low = {static_cast<uint64_t>(I % 2 * kDraws + I / 2)...};
  return __builtin_shuffle(a, b, low + static_cast<uint64_t>(first));
}

/// Blocks that are drawn together.
constexpr int64_t kDrawn = kStreams * kDraws;

/// The random bytes of the elements of blocks of these numbers, whole kDrawn of them.
inline void draw_blocks(const Draw& draw, const uint64_t* numbers, int64_t blocks, uint8_t* bytes) {
  constexpr auto lanes = std::make_integer_sequence<int, kDraws>();
  for (int64_t b = 0; b < blocks; b += kDrawn) {
    U64 block[kStreams];
    std::memcpy(block, numbers + b, sizeof block);
    const RandomWords r = philox_lanes(draw, block);
    for (int64_t i = 0; i < kStreams; ++i) {
      const U64 low = (r.word[0][i] & 0xFFFFFFFFu) | r.word[1][i] << 32;
      const U64 high = (r.word[2][i] & 0xFFFFFFFFu) | r.word[3][i] << 32;
      const U64 parts[2] = {interleaved(low, high, 0, lanes), interleaved(low, high, kDraws / 2, lanes)};
      std::memcpy(bytes + (b + i * kDraws) * kNvfp4Block, parts, sizeof parts);
    }
  }
}

/// words[j][c]: word j of the random bits of block numbers[c], whole kDrawn blocks.
template <int64_t Count>
inline void draw_columns(const Draw& draw, const uint64_t (&numbers)[Count], uint32_t (&words)[4][Count]) {
  typedef Vec<uint32_t, kDraws> Low;
  for (int64_t c = 0; c < Count; c += kDrawn) {
    U64 block[kStreams];
    std::memcpy(block, numbers + c, sizeof block);
    const RandomWords r = philox_lanes(draw, block);
    for (int64_t i = 0; i < kStreams; ++i)
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<Low*>(&words[j][c + i * kDraws]) = __builtin_convertvector(r.word[j][i], Low);
  }
}

/// E2M1 codes of x times the multipliers of its blocks, whole quads (numerics.md 5.6, 0.11).
template <bool kNan, DType D>
inline void encode_line_stochastic(const Plain<D>* x, const float* multiplier, int64_t count, const uint8_t* random,
                                   uint8_t* codes) {
  for (int64_t i = 0; i < count; i += kQuad) {
    F32 v[4];
    U32 code[4];
    load_as<D>(x + i, v);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const int64_t at = i + q * kLanes;
      code[q] = encode_stochastic_lanes<kNan>(v[q] * broadcast(multiplier[at / kNvfp4Block]), load_u8(random + at));
    }
    store_u8(codes + i, code);
  }
}
