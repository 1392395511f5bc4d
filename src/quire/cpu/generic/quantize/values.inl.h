// Elements of a tile as they are in memory, padded to whole blocks, or Hadamard-transformed.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"

/// Rows of elements in memory: `rows` x `cols`, and +0 beyond, up to whole blocks and quads. Row 0 and column 0 are at
/// (row, col) of the tensor.
template <DType D>
struct Values {
  const Plain<D>* data;
  int64_t stride, rows, cols, row, col;

  const Plain<D>* line(int64_t r) const { return data + r * stride; }
};

/// Elements from one row of a tile's copy to the next: not a power of two, so that a column does not share cache sets.
constexpr int64_t kValueStride = kTile + 32;

/// Memory for a tile in any dtype.
struct TileScratch {
  alignas(64) float memory[kTile * kValueStride];

  template <DType D>
  Plain<D>* as() {
    return reinterpret_cast<Plain<D>*>(memory);
  }
};

/// Rows of the tensor that are in memory: all of it, or a strip that has just been computed.
struct Rows {
  Matrix x;
  int64_t first;  ///< row of the tensor that row 0 of x is: on a boundary of blocks of lines that cross rows
};

/// A copy of a tile, padded with +0 to kTile columns and `rows` rows (numerics.md 0.12). Asks for the memory of the
/// next tile: more rows are open at once than a processor foresees by itself.
template <DType D>
Values<D> load_tile(const Rows& from, const Tile& tile, int64_t rows, TileScratch& scratch) {
  Plain<D>* to = scratch.as<D>();
  for (int64_t r = 0; r < tile.rows; ++r, to += kValueStride) {
    const void* line = element_of(from.x, tile.row + r, tile.col);
    prefetch(static_cast<const Plain<D>*>(line) + kTile, kTile * size_of(D));
    std::memcpy(to, line, static_cast<size_t>(tile.cols * size_of(D)));
    std::fill(to + tile.cols, to + kTile, Plain<D>{});
  }
  for (int64_t r = tile.rows; r < rows; ++r, to += kValueStride) std::fill_n(to, kTile, Plain<D>{});
  return {scratch.as<D>(), kValueStride, tile.rows, tile.cols, from.first + tile.row, tile.col};
}

/// Transforms kLanes columns of 16 rows (numerics.md 0.10), not yet rounded.
template <DType D>
inline void hadamard_columns(const Plain<D>* x, int64_t stride, bool signs, F32 (&v)[kHadamardSize]) {
#pragma GCC unroll 16
  for (int i = 0; i < kHadamardSize; ++i) v[i] = load_as<D>(x + i * stride);
  hadamard16(v, signs);
}

/// The transform of a tile whose rows are padded to whole groups, rounded to bfloat16 (numerics.md 5.3).
template <DType D>
[[gnu::flatten]] Values<DType::bf16> transformed(const Values<D>& from, Hadamard hadamard, TileScratch& scratch) {
  const int64_t rows = round_up(from.rows, kHadamardSize);
  uint16_t* to = scratch.as<DType::bf16>();
  for (int64_t r = 0; r < rows; r += kHadamardSize)
    for (int64_t c = 0; c < kTile; c += kLanes) {
      alignas(64) F32 v[kHadamardSize];
      hadamard_columns<D>(from.line(r) + c, from.stride, hadamard == Hadamard::signs, v);
#pragma GCC unroll 16
      for (int i = 0; i < kHadamardSize; ++i) store_bf16(to + (r + i) * kValueStride + c, v[i]);
    }
  return {to, kValueStride, rows, from.cols, from.row, from.col};
}

/// Largest bits of the transforms of 16 rows of kTile columns; without kNan, those of NaN are above infinity.
template <DType D, bool kNan>
[[gnu::flatten]] int32_t transformed_magnitude(const Plain<D>* x, int64_t stride, bool signs) {
  I32 largest_bits{};
  for (int64_t c = 0; c < kTile; c += kLanes) {
    alignas(64) F32 v[kHadamardSize];
    hadamard_columns<D>(x + c, stride, signs, v);
#pragma GCC unroll 16
    for (const F32& each : v) {
      const I32 bits = reinterpret_cast<I32>(each) & std::numeric_limits<int32_t>::max();
      largest_bits = larger(largest_bits, kNan ? bits > kInfinity<DType::f32> ? I32{} : bits : bits);
    }
  }
  return largest<int32_t, kLanes>(largest_bits);
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
        for (int64_t r = 0; r < kGroupRows; ++r) {
          prefetch(at + r * stride + kTile, kTile * size_of(d));
          plain_amax = std::max(plain_amax, line_amax<d>(at + r * stride, kTile));
        }
        int32_t bits = transformed_magnitude<d, false>(at, stride, signs);
        if (bits > kInfinity<DType::f32>) bits = transformed_magnitude<d, true>(at, stride, signs);
        found = std::max(found, bits);
      }
      plain.add(plain_amax);
      transforms.add(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(found))));
    });
  });
  return {plain.value(), transforms.value()};
}
