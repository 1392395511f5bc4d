// Products of plain matrices (numerics.md 6.12) whose rows do not depend on one another. Every output is a sum of dot
// products of kPlainDepth positions, in order; a dot product adds position l to partial sum l mod kLanes, and then the
// partial sums by halves. Nothing of this depends on how many rows and columns there are.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"

/// Positions of the contraction that are widened to float32 at a time.
constexpr int64_t kPlainDepth = 256;
/// Rows and columns of the output that one task computes.
constexpr int64_t kPlainTile = 64;
/// Rows and columns of the output whose partial sums registers hold.
constexpr int kPlainRows = 4, kPlainCols = kRegisters >= 32 ? 4 : 2;

/// A matrix as lines along the contraction.
struct PlainLines {
  Matrix from;
  bool across;  ///< lines are columns of the matrix
  DType dtype;  ///< of the result, to which elements are rounded

  /// Positions [begin, begin + size) of some lines, kPlainDepth apart, and zeros up to a whole vector.
  void read(int64_t first, int64_t count, int64_t begin, int64_t size, float* to) const {
    for (int64_t l = 0; across && l < size; ++l) {
      float line[kPlainTile];
      read_line(from.dtype, element_of(from, begin + l, first), count, line);
      for (int64_t i = 0; i < count; ++i) to[i * kPlainDepth + l] = line[i];
    }
    for (int64_t i = 0; i < count; ++i, to += kPlainDepth) {
      if (!across) read_line(from.dtype, element_of(from, first + i, begin), size, to);
      if (dtype != from.dtype) round_line<kPlainDepth>(dtype, size, to);
      std::fill(to + size, to + round_up(size, kLanes), 0.0f);
    }
  }
};

/// Adds the partial sums of each of kLanes vectors by halves: a vector of these totals.
inline F32 totals(F32 (&vectors)[kLanes]) {
  transpose(vectors);  // now a vector has the partial sums of one lane
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) vectors[i] += vectors[i + half];
  return vectors[0];
}

/// Adds dot products of lines of a and of b to sums, whose rows are kPlainTile apart.
template <int kRows, int kCols>
inline void add_dot_products(const float* a, const float* b, int64_t size, float* sums) {
  constexpr int kCount = kRows * kCols;
  F32 partial[(kCount + kLanes - 1) / kLanes * kLanes] = {};
  for (int64_t l = 0; l < size; l += kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const F32 x = load(a + i * kPlainDepth + l);
#pragma GCC unroll 16
      for (int j = 0; j < kCols; ++j)
        partial[i * kCols + j] = multiply_add(x, load(b + j * kPlainDepth + l), partial[i * kCols + j]);
    }
  }
  for (int first = 0; first < kCount; first += kLanes) {
    F32 vectors[kLanes];
    std::copy_n(partial + first, kLanes, vectors);
    alignas(64) float found[kLanes];
    store(found, totals(vectors));
    for (int i = 0; i < kLanes && first + i < kCount; ++i)
      sums[(first + i) / kCols * kPlainTile + (first + i) % kCols] += found[i];
  }
}

/// The same of all `cols` lines of b.
template <int kRows>
void add_rows_of_dot_products(const float* a, const float* b, int64_t cols, int64_t size, float* sums) {
  constexpr int kCols = kRows == 1 ? kLanes : kPlainCols;
  int64_t j = 0;
  for (; j + kCols <= cols; j += kCols) add_dot_products<kRows, kCols>(a, b + j * kPlainDepth, size, sums + j);
  for (; j < cols; ++j) add_dot_products<kRows, 1>(a, b + j * kPlainDepth, size, sums + j);
}

/// The part of the output that is `tile`.
inline void multiply_plain_tile(const MatmulProblem& p, const Tile& tile) {
  constexpr int64_t kLines = kPlainTile * kPlainDepth;
  const PlainLines rows{p.a, p.transpose_a, p.out.dtype}, cols{p.b, !p.transpose_b, p.out.dtype};
  const int64_t contraction = p.transpose_a ? p.a.rows : p.a.cols;
  const ThreadMemory memory(static_cast<int64_t>(sizeof(float)) * (2 * kLines + kPlainTile * kPlainTile));
  float* const a = static_cast<float*>(memory.get());
  float *const b = a + kLines, *const sums = b + kLines;
  std::fill_n(sums, kPlainTile * kPlainTile, 0.0f);
  for (int64_t begin = 0; begin < contraction; begin += kPlainDepth) {
    const int64_t size = std::min(kPlainDepth, contraction - begin);
    rows.read(tile.row, tile.rows, begin, size, a);
    cols.read(tile.col, tile.cols, begin, size, b);
    int64_t i = 0;
    for (; i + kPlainRows <= tile.rows; i += kPlainRows)
      add_rows_of_dot_products<kPlainRows>(a + i * kPlainDepth, b, tile.cols, size, sums + i * kPlainTile);
    for (; i < tile.rows; ++i)
      add_rows_of_dot_products<1>(a + i * kPlainDepth, b, tile.cols, size, sums + i * kPlainTile);
  }
  float bias[kPlainTile] = {};
  if (p.bias.data) {
    const Matrix all{p.bias.data, p.bias.dtype, 1, p.out.cols, p.out.cols};
    float line[kPlainDepth];
    PlainLines{all, false, p.out.dtype}.read(0, 1, tile.col, tile.cols, line);
    std::copy_n(line, tile.cols, bias);
  }
  for (int64_t i = 0; i < tile.rows; ++i) {
    float* const row = sums + i * kPlainTile;
    for (int64_t j = 0; p.bias.data && j < tile.cols; ++j) row[j] += bias[j];
    write_line(p.out.dtype, row, tile.cols,
               static_cast<char*>(p.out.data) + ((tile.row + i) * p.out.row_stride + tile.col) * size_of(p.out.dtype));
  }
}

void matmul(const MatmulProblem& p) {
  const int64_t tiles = ceil_div(p.out.rows, kPlainTile) * ceil_div(p.out.cols, kPlainTile);
  parallel_for(tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) multiply_plain_tile(p, tile_at(Matrix(p.out), kPlainTile, kPlainTile, t));
  });
}
