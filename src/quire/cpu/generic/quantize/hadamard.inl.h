// The Hadamard transform of columns (numerics.md 0.10, 5.3).
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/values.inl.h"

/// Columns that are transformed at once, as two vectors.
constexpr int64_t kPair = 2 * kLanes;

/// kPair elements as two vectors: of bfloat16 those with even numbers and those with odd ones.
template <DType D>
inline F32 load_part(const Plain<D>* x, int part) {
  if constexpr (D != DType::bf16) return load_as<D>(x + part * kLanes);
  const U32 lanes = *reinterpret_cast<const U32*>(x);
  return float_of(part == 0 ? lanes << 16 : lanes & 0xFFFF0000u);
}

/// Stores the upper halves of what load_part() loaded as bfloat16.
template <DType D>
inline void store_parts(uint16_t* to, U32 first, U32 second) {
  if constexpr (D == DType::bf16)
    *reinterpret_cast<U32*>(to) = blend_bits(0xFFFFu, first >> 16, second);
  else
    store_upper(to, first, second);
}

/// The largest magnitude of 16 rows of kTile columns, with NaN above infinity.
template <DType D>
inline Bits<D> group_magnitude(const Plain<D>* x, int64_t stride) {
  constexpr int64_t width = kWidth<D>;
  Vec<Bits<D>, width> m[2] = {};
  for (int64_t r = 0; r < kGroupRows; r += 2)
    for (int64_t c = 0; c < kTile; c += width)
      for (int i = 0; i < 2; ++i) m[i] = larger(m[i], magnitudes<D, width, false>(x + (r + i) * stride + c));
  return largest<Bits<D>, width>(larger(m[0], m[1]));
}

/// Whether the transform of 16 rows may be scaled at its end instead of its beginning: no sum of 16 elements overflows,
/// and, as the least float16 or bfloat16 is far above the least float32, a quarter of each sum is exact.
template <DType D>
inline bool may_scale_last(Bits<D> magnitude, Hadamard hadamard) {
  constexpr int32_t kMost = D == DType::bf16 ? (127 + 123) << 7 : kInfinity<D>;
  return D != DType::f32 && hadamard == Hadamard::signs && magnitude < kMost;
}

/// The stages of hadamard16() with signs, below kEnd, of numbers that were not multiplied. A sum of a number and a
/// negated one is the difference, so what hadamard16() negates takes part as it is; and results have the sign of the
/// first number of their group, that is, all are right in the end, because the very first number is not negated.
template <unsigned kEnd>
inline void hadamard_stages(F32 (&v)[kHadamardSize]) {
  static_assert(!(kHadamardSigns & 1u));
#pragma GCC unroll 4
  for (unsigned stride = 1; stride < kEnd; stride *= 2)
#pragma GCC unroll 16
    for (unsigned i = 0; i < kHadamardSize; ++i)
      if (!(i & stride)) {
        const unsigned first = i & ~(stride - 1);
        const bool signs_differ = (kHadamardSigns >> first ^ kHadamardSigns >> (first + stride)) & 1u;
        const F32 a = v[i], b = v[i + stride];
        v[i] = signs_differ ? a - b : a + b;
        v[i + stride] = signs_differ ? a + b : a - b;
      }
}

/// The transform of 16 rows of kTile columns, rounded to bfloat16. kScaleLast: as may_scale_last() says.
template <DType D, bool kScaleLast>
[[gnu::flatten, gnu::noinline]] void transform_group(const Plain<D>* x, int64_t stride, bool signs, uint16_t* to) {
  for (int64_t c = 0; c < kTile; c += kPair) {
    alignas(64) U32 first[kHadamardSize];
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      alignas(64) F32 v[kHadamardSize];
#pragma GCC unroll 16
      for (int i = 0; i < kHadamardSize; ++i) v[i] = load_part<D>(x + i * stride + c, part);
      if constexpr (kScaleLast)
        hadamard_stages<kHadamardSize>(v);
      else
        hadamard16(v, signs);
#pragma GCC unroll 16
      for (int i = 0; i < kHadamardSize; ++i) {
        // Adding 0 makes +0 of -0.
        if constexpr (kScaleLast) v[i] = multiply_add(v[i], broadcast(0.25f), F32{});
        const U32 rounded = rounded_to_bf16<!kScaleLast>(v[i]);
        if (part == 0)
          first[i] = rounded;
        else
          store_parts<D>(to + i * kValueStride + c, first[i], rounded);
      }
    }
  }
}

/// The transform of a tile whose rows are padded to whole groups, rounded to bfloat16 (numerics.md 5.3).
template <DType D>
Values<DType::bf16> transformed(const Values<D>& from, Hadamard hadamard, TileScratch& scratch) {
  const int64_t rows = round_up(from.rows, kHadamardSize);
  uint16_t* to = scratch.as<DType::bf16>();
  for (int64_t r = 0; r < rows; r += kHadamardSize) {
    if (may_scale_last<D>(group_magnitude<D>(from.line(r), from.stride), hadamard))
      transform_group<D, true>(from.line(r), from.stride, true, to + r * kValueStride);
    else
      transform_group<D, false>(from.line(r), from.stride, hadamard == Hadamard::signs, to + r * kValueStride);
  }
  return {to, kValueStride, rows, from.cols, from.row, from.col, from.meanwhile};
}

inline I32 magnitude_bits(F32 x) { return reinterpret_cast<I32>(x) & std::numeric_limits<int32_t>::max(); }

/// Largest bits of the transforms of 16 rows of kTile columns; without kNan, those of NaN are above infinity.
template <DType D, bool kNan>
[[gnu::flatten]] int32_t transformed_magnitude(const Plain<D>* x, int64_t stride, bool signs) {
  I32 largest_bits{};
  for (int64_t c = 0; c < kTile; c += kLanes) {
    alignas(64) F32 v[kHadamardSize];
#pragma GCC unroll 16
    for (int i = 0; i < kHadamardSize; ++i) v[i] = load_as<D>(x + i * stride + c);
    hadamard16(v, signs);
#pragma GCC unroll 16
    for (const F32& each : v) {
      const I32 bits = magnitude_bits(each);
      largest_bits = larger(largest_bits, kNan ? bits > kInfinity<DType::f32> ? I32{} : bits : bits);
    }
  }
  return largest<int32_t, kLanes>(largest_bits);
}

/// The same where may_scale_last() holds. The larger one of a sum and a difference is the sum of the magnitudes.
template <DType D>
[[gnu::flatten]] int32_t transformed_magnitude(const Plain<D>* x, int64_t stride) {
  I32 largest_bits{};
  for (int64_t c = 0; c < kTile; c += kPair)
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      alignas(64) F32 v[kHadamardSize];
#pragma GCC unroll 16
      for (int i = 0; i < kHadamardSize; ++i) v[i] = load_part<D>(x + i * stride + c, part);
      constexpr int half = kHadamardSize / 2;
      hadamard_stages<half>(v);
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) {
        const F32 a = reinterpret_cast<F32>(magnitude_bits(v[i])),
                  b = reinterpret_cast<F32>(magnitude_bits(v[i + half]));
        largest_bits = larger(largest_bits, reinterpret_cast<I32>(a + b));
      }
    }
  return std::bit_cast<int32_t>(0.25f * std::bit_cast<float>(largest<int32_t, kLanes>(largest_bits)));
}

/// The amax of 16 rows of kTile columns, with a NaN among them.
template <DType D>
float group_amax(const Plain<D>* x, int64_t stride) {
  float amax = 0;
  for (int64_t r = 0; r < kGroupRows; ++r) amax = std::max(amax, line_amax<D>(x + r * stride, kTile));
  return amax;
}

/// What must be known of a tensor before its blocks.
struct Amaxes {
  float plain = 0, transformed = 0;
};

/// amax of x, and of all 16-token Hadamard transforms of its columns (numerics.md 5.2), from one read.
Amaxes transformed_amaxes(const Matrix& x, Hadamard hadamard) {
  SharedMaximum plain, transforms;
  const int64_t groups = ceil_div(x.rows, kGroupRows) * ceil_div(x.cols, kTile);
  const bool signs = hadamard == Hadamard::signs;
  parallel_for(groups, kGrain / (kGroupRows * kTile), [&](int64_t begin, int64_t end) {
    with_dtype(x.dtype, [&](auto d) {
      alignas(64) Plain<d> copy[kGroupRows * kTile];
      float plain_amax = 0;
      int32_t found = 0;
      for (int64_t t = begin; t < end; ++t) {
        const Tile tile = tile_at(x, kGroupRows, kTile, t);
        const auto* at = static_cast<const Plain<d>*>(element_of(x, tile.row, tile.col));
        int64_t stride = x.row_stride;
        if (tile.rows < kGroupRows || tile.cols < kTile) {
          std::fill(std::begin(copy), std::end(copy), Plain<d>{});
          for (int64_t r = 0; r < tile.rows; ++r) std::copy_n(at + r * stride, tile.cols, copy + r * kTile);
          at = copy;
          stride = kTile;
        }
        for (int64_t r = 0; r < kGroupRows; ++r) prefetch(at + r * stride + kTile, kTile * size_of(d));
        const Bits<d> magnitude = group_magnitude<d>(at, stride);
        plain_amax =
            std::max(plain_amax, magnitude <= kInfinity<d> ? magnitude_value<d>(magnitude) : group_amax<d>(at, stride));
        int32_t bits = may_scale_last<d>(magnitude, hadamard) ? transformed_magnitude<d>(at, stride)
                                                              : transformed_magnitude<d, false>(at, stride, signs);
        if (bits > kInfinity<DType::f32>) bits = transformed_magnitude<d, true>(at, stride, signs);
        found = std::max(found, bits);
      }
      plain.add(plain_amax);
      transforms.add(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(found))));
    });
  });
  return {plain.value(), transforms.value()};
}
