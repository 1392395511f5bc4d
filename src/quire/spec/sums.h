// The order of sums (numerics.md 6.6, 11.2), which gives them the same bits on every device.
#pragma once

#include <cstdint>

#include "quire/base/host_device.h"

namespace quire {

/// Partial sums of a row, which are added by halves: element j goes to the one of number j mod 16.
inline constexpr int64_t kRowSums = 16;
/// Rows of a column that are added in order before their sum is added to the column's.
inline constexpr int64_t kColumnChunk = 128;

/// The sum of term(j) over the `count` elements of a row.
struct SumOfRow {
  template <class Term>
  QUIRE_HOST_DEVICE float operator()(int64_t count, const Term& term) const {
    float s[kRowSums] = {};
    int64_t j = 0;
    for (; j + kRowSums <= count; j += kRowSums) {
      QUIRE_UNROLL
      for (int64_t l = 0; l < kRowSums; ++l) s[l] += term(j + l);
    }
    QUIRE_UNROLL
    for (int64_t l = 0; l < kRowSums; ++l)
      if (j + l < count) s[l] += term(j + l);
    QUIRE_UNROLL
    for (int64_t half = kRowSums / 2; half > 0; half /= 2) {
      QUIRE_UNROLL
      for (int64_t l = 0; l < kRowSums / 2; ++l)
        if (l < half) s[l] += s[l + half];
    }
    return s[0];
  }
};

/// A sum over the elements of a row, divided by their number.
constexpr float mean_of(float sum, int64_t count) { return sum / static_cast<float>(count < 1 ? 1 : count); }

/// The chunks of a column of `rows` rows.
constexpr int64_t column_chunks(int64_t rows) { return (rows + kColumnChunk - 1) / kColumnChunk; }

/// The sum of term(r) over the rows of a chunk of a column of `rows` rows. Sum: a number, or those of several columns.
template <class Sum = float, class Term>
QUIRE_HOST_DEVICE Sum sum_of_chunk(int64_t chunk, int64_t rows, const Term& term) {
  const int64_t begin = chunk * kColumnChunk, end = begin + kColumnChunk < rows ? begin + kColumnChunk : rows;
  Sum sum{};
  for (int64_t r = begin; r < end; ++r) sum += term(r);
  return sum;
}

/// The sum of a column, of which chunk(c) is the sum of a chunk.
template <class Chunk>
QUIRE_HOST_DEVICE float sum_of_chunks(int64_t rows, const Chunk& chunk) {
  float sum = 0;
  for (int64_t c = 0; c < column_chunks(rows); ++c) sum += chunk(c);
  return sum;
}

}  // namespace quire
