// Elements of a tile as they are in memory, padded to whole blocks, or Hadamard-transformed.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"
#include "quire/cpu/generic/elements/vectors.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/meanwhile.inl.h"

/// Rows of elements in memory: `rows` x `cols`, and +0 beyond, up to whole blocks and quads. Row 0 and column 0 are at
/// (row, col) of the tensor.
template <DType D>
struct Values {
  const Plain<D>* data;
  int64_t stride, rows, cols, row, col;
  Meanwhile meanwhile = {};  ///< for the loop that encodes the rows

  const Plain<D>* line(int64_t r) const { return data + r * stride; }
  /// Some of the rows, and nothing to do meanwhile.
  Values part(int64_t first, int64_t count) const { return {line(first), stride, count, cols, row + first, col}; }
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

/// Elements of whole tiles where they lie.
template <DType D>
Values<D> values_at(const Rows& from, const Tile& tile) {
  const auto* x = static_cast<const Plain<D>*>(element_of(from.x, tile.row, tile.col));
  return {x, from.x.row_stride, tile.rows, tile.cols, from.first + tile.row, tile.col};
}

/// A copy of a tile, padded with +0 to kTile columns and `rows` rows (numerics.md 0.12).
template <DType D>
Values<D> load_tile(const Rows& from, const Tile& tile, int64_t rows, TileScratch& scratch) {
  Plain<D>* to = scratch.as<D>();
  for (int64_t r = 0; r < tile.rows; ++r, to += kValueStride) {
    const void* line = element_of(from.x, tile.row + r, tile.col);
    std::memcpy(to, line, static_cast<size_t>(tile.cols * size_of(D)));
    std::fill(to + tile.cols, to + kTile, Plain<D>{});
  }
  for (int64_t r = tile.rows; r < rows; ++r, to += kValueStride) std::fill_n(to, kTile, Plain<D>{});
  return {scratch.as<D>(), kValueStride, tile.rows, tile.cols, from.first + tile.row, tile.col};
}
