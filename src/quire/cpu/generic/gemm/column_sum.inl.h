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

/// Adds kRows rows, whose first elements are at x, to a total; asks for as many that follow.
template <DType D, int kRows>
inline void add_rows(const Plain<D>* x, int64_t stride, int64_t count, float* total) {
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    F32 sum = load(total + j);
#pragma GCC unroll 2
    for (int i = 0; i < kRows; ++i) {
      __builtin_prefetch(x + (i + kRows) * stride + j);
      sum += load_as<D>(x + i * stride + j);
    }
    store(total + j, sum);
  }
  for (; j < count; ++j)
    for (int i = 0; i < kRows; ++i) total[j] += widen<D>(x[i * stride + j]);
}

/// Sums of rows [first, last) of columns [col, col + count).
template <DType D>
inline void sum_rows(const Matrix& x, std::array<int64_t, 2> rows, int64_t col, int64_t count, float* total) {
  constexpr int kRows = 2;
  std::fill_n(total, count, 0.0f);
  const auto line = [&](int64_t r) { return static_cast<const Plain<D>*>(element_of(x, r, col)); };
  int64_t r = rows[0];
  for (; r + kRows <= rows[1]; r += kRows) add_rows<D, kRows>(line(r), x.row_stride, count, total);
  for (; r < rows[1]; ++r) add_rows<D, 1>(line(r), x.row_stride, count, total);
}

/// Tasks are pieces of chunks, as long as they can be so that memory is read in long runs and all threads have some;
/// the chunks' sums are added afterwards.
void column_sum(const ColumnSumProblem& p) {
  constexpr int64_t kLongestRun = 4096, kShortestRun = 1024;
  const int64_t chunks = ceil_div(p.x.rows, kSumRows);
  int64_t run = kLongestRun;
  while (run > kShortestRun && chunks * ceil_div(p.x.cols, run) < 4 * parallelism()) run /= 2;
  const int64_t pieces = ceil_div(p.x.cols, run);
  const Scratch parts(chunks * p.x.cols);
  parallel_for(chunks * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t chunk = t / pieces, col = t % pieces * run, count = std::min(run, p.x.cols - col);
      const std::array rows{chunk * kSumRows, std::min((chunk + 1) * kSumRows, p.x.rows)};
      with_dtype(p.x.dtype, [&](auto d) { sum_rows<d>(p.x, rows, col, count, parts.get() + chunk * p.x.cols + col); });
    }
  });
  sum_chunks(parts.get(), chunks, p.x.cols, {p.out, p.out_dtype, 1, p.x.cols, p.x.cols});
}
