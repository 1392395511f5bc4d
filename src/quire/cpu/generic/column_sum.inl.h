// Sums over rows (numerics.md 6.6).

/// Columns of one task.
constexpr int64_t kSumCols = 256;
/// Rows that are summed before their sum is added to the total: every column adds its rows in order, chunk by chunk, so
/// that the result depends on nothing but the number of rows.
constexpr int64_t kSumRows = 128;

inline void sum_columns(const Matrix& x, int64_t col, int64_t count, float* total) {
  std::fill_n(total, count, 0.0f);
  for (int64_t first = 0; first < x.rows; first += kSumRows) {
    float part[kSumCols] = {}, line[kSumCols];
    const int64_t last = std::min(first + kSumRows, x.rows);
    for (int64_t row = first; row < last; ++row) {
      read_line(x.dtype, element_of(x, row, col), count, line);
      for (int64_t j = 0; j < count; ++j) part[j] += line[j];
    }
    for (int64_t j = 0; j < count; ++j) total[j] += part[j];
  }
}

void column_sum(const ColumnSumProblem& p) {
  parallel_for(ceil_div(p.x.cols, kSumCols), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = i * kSumCols, count = std::min(kSumCols, p.x.cols - col);
      float sum[kSumCols];
      sum_columns(p.x, col, count, sum);
      write_line(p.out_dtype, sum, count, static_cast<char*>(p.out) + col * size_of(p.out_dtype));
    }
  });
}
