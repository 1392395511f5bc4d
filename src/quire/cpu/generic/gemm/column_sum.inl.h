// Sums over rows (numerics.md 6.6).
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/elements/plain.inl.h"

/// Columns of one task.
constexpr int64_t kSumCols = 256;
/// Rows that are summed before their sum is added to the total: every column adds its rows in order, chunk by chunk, so
/// that the result depends on nothing but the number of rows.
constexpr int64_t kSumRows = 128;

/// out = the sum of `chunks` lines, one per `stride` floats, in order.
void sum_chunks(const float* parts, int64_t chunks, int64_t stride, const MutableMatrix& out) {
  parallel_for(ceil_div(out.cols, kSumCols), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = i * kSumCols, count = std::min(kSumCols, out.cols - col);
      float total[kSumCols] = {};
      for (int64_t c = 0; c < chunks; ++c)
        for (int64_t j = 0; j < count; ++j) total[j] += parts[c * stride + col + j];
      write_line(out.dtype, total, count, static_cast<char*>(out.data) + col * size_of(out.dtype));
    }
  });
}

/// Sums of rows [first, last) of columns [col, col + count).
template <DType D>
inline void sum_rows(const Matrix& x, std::array<int64_t, 2> rows, int64_t col, int64_t count, float* total) {
  std::fill_n(total, count, 0.0f);
  for (int64_t r = rows[0]; r < rows[1]; ++r) {
    const auto* line = static_cast<const Plain<D>*>(element_of(x, r, col));
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) store(total + j, load(total + j) + load_as<D>(line + j));
    for (; j < count; ++j) total[j] += widen<D>(line[j]);
  }
}

/// Tasks are pieces of chunks, so that memory is read in long runs; the chunks' sums are added afterwards.
void column_sum(const ColumnSumProblem& p) {
  constexpr int64_t kRun = 1024;
  const int64_t chunks = ceil_div(p.x.rows, kSumRows), pieces = ceil_div(p.x.cols, kRun);
  const Scratch parts(chunks * p.x.cols);
  parallel_for(chunks * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t chunk = t / pieces, col = t % pieces * kRun, count = std::min(kRun, p.x.cols - col);
      const std::array rows{chunk * kSumRows, std::min((chunk + 1) * kSumRows, p.x.rows)};
      with_dtype(p.x.dtype, [&](auto d) { sum_rows<d>(p.x, rows, col, count, parts.get() + chunk * p.x.cols + col); });
    }
  });
  sum_chunks(parts.get(), chunks, p.x.cols, {p.out, p.out_dtype, 1, p.x.cols, p.x.cols});
}
