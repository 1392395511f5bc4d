// LayerNorm and RMSNorm, and their gradients (numerics.md 11.2).
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/gemm/column_sum.inl.h"
#include "quire/cpu/generic/pointwise/produce.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"

/// Partial sums of a row: element j goes to sum j mod 16. The number is that of the contract, not of a vector's lanes.
constexpr int64_t kPartialSums = 16;

/// Rows whose sums are found together: additions of one wait for each other.
constexpr int kNormRows = 4;

/// Adds the partial sums of a row by halves until one is left.
inline float sum_of_partial(float (&s)[kPartialSums]) {
  for (int64_t half = kPartialSums / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) s[l] += s[l + half];
  return s[0];
}

/// sums[i] = the sum over j of term(i, x[i][j]), where term takes a float or a vector of them: the partial sums in
/// order, then these.
template <DType D, class Term>
inline void sum_rows_of(const Plain<D>* const (&x)[kNormRows], int64_t count, const Term& term,
                        float (&sums)[kNormRows]) {
  constexpr int vectors = kPartialSums / kLanes;
  // Whole runs of 16: 16 partial sums of each row in lanes, whatever a vector holds.
  F32 partial[kNormRows][vectors] = {};
  int64_t j = 0;
  for (; j + kPartialSums <= count; j += kPartialSums)
#pragma GCC unroll 4
    for (int i = 0; i < kNormRows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) partial[i][v] += term(i, load_as<D>(x[i] + j + v * kLanes));
  // The rest of each row to the same partial sums, then these by halves: the order is part of the contract.
  for (int i = 0; i < kNormRows; ++i) {
    float s[kPartialSums];
    for (int v = 0; v < vectors; ++v) store(s + v * kLanes, partial[i][v]);
    for (int64_t l = 0; j + l < count; ++l) s[l] += term(i, widen<D>(x[i][j + l]));
    sums[i] = sum_of_partial(s);
  }
}

/// A vector of parameters as f32; with `centered`, plus 1.
inline std::vector<float> widened(const Vector& v, int64_t count, bool centered) {
  std::vector<float> out(static_cast<size_t>(count));
  read_line(v.dtype, v.data, count, out.data());
  if (centered)
    for (float& x : out) x += 1.0f;
  return out;
}

struct Moments {
  float mean, rstd;
};

template <DType D>
[[gnu::flatten]] inline void moments(const NormProblem& p, const Plain<D>* const (&x)[kNormRows],
                                     Moments (&m)[kNormRows]) {
  const int64_t count = p.x.cols;
  const float n = static_cast<float>(std::max<int64_t>(1, count));
  // The mean, which RMSNorm takes as 0, then the squares of the distances from it: a second read, but no cancellation.
  float mean[kNormRows] = {}, squares[kNormRows];
  if (p.kind == NormKind::layer) {
    sum_rows_of<D>(x, count, [](int, auto v) { return v; }, mean);
    for (float& each : mean) each /= n;
  }
  const auto square = [&](int i, auto v) {
    const auto d = v - mean[i];
    return d * d;
  };
  sum_rows_of<D>(x, count, square, squares);
  for (int i = 0; i < kNormRows; ++i) m[i] = {mean[i], 1.0f / std::sqrt(squares[i] / n + p.eps)};
}

/// Parameters of a norm in f32.
struct Gains {
  const float *gamma, *beta;  ///< beta: null if there is none
  bool finite;                ///< so that finite elements give no NaN
};

/// A row normalized; asks for the row that is as far ahead as rows are handled together.
template <DType D>
[[gnu::flatten]] inline void normalize(const Moments& m, const Gains& g, std::span<const Plain<D>> x, int64_t stride,
                                       Plain<D>* to) {
  const auto value = [&](auto v, auto gamma) { return ((v - m.mean) * m.rstd) * gamma; };
  const int64_t count = std::ssize(x), whole = count / (2 * kLanes) * (2 * kLanes);
  const auto run = [&](auto known, auto has_beta) {
    const auto lanes = [&](int64_t j) {
      const F32 y = value(load_as<D>(x.data() + j), load(g.gamma + j));
      return has_beta ? y + load(g.beta + j) : y;
    };
    for (int64_t j = 0; j < whole; j += 2 * kLanes) {
      __builtin_prefetch(x.data() + kNormRows * stride + j, 0, 2);
      store_as<D, known>(to + j, lanes(j), lanes(j + kLanes));
    }
  };
  // A row whose rstd is an ordinary number has finite elements, at most sqrt(count) once normalized.
  constexpr std::integral_constant<Known, Known::nothing> nothing;
  constexpr std::integral_constant<Known, Known::no_nan> no_nan;
  const bool ordinary = g.finite && m.rstd > 0 && is_finite(m.rstd);
  if (g.beta)
    ordinary ? run(no_nan, std::true_type{}) : run(nothing, std::true_type{});
  else
    ordinary ? run(no_nan, std::false_type{}) : run(nothing, std::false_type{});
  float rest[2 * kLanes];
  for (int64_t j = whole; j < count; ++j) {
    const float y = value(widen<D>(x[static_cast<size_t>(j)]), g.gamma[j]);
    rest[j - whole] = g.beta ? y + g.beta[j] : y;
  }
  write_as<D>(rest, count - whole, to + whole);
}

/// Rows of the result from `first` on, as many as y has; x and y are of one dtype.
template <DType D>
void norm_rows(const NormProblem& p, const Gains& g, int64_t first, const MutableMatrix& y) {
  const int64_t count = p.x.cols;
  for (int64_t r = 0; r < y.rows; r += kNormRows) {
    const Plain<D>* x[kNormRows];
    // Past the last row it is taken again.
    for (int i = 0; i < kNormRows; ++i)
      x[i] = static_cast<const Plain<D>*>(element_of(p.x, first + std::min(r + i, y.rows - 1), 0));
    Moments m[kNormRows];
    moments<D>(p, x, m);
    for (int i = 0; i < std::min<int64_t>(kNormRows, y.rows - r); ++i) {
      if (p.mean) p.mean[first + r + i] = m[i].mean;
      if (p.rstd) p.rstd[first + r + i] = m[i].rstd;
      auto* to = static_cast<Plain<D>*>(rows_of(y, r + i, 1).data);
      normalize<D>(m[i], g, {x[i], static_cast<size_t>(count)}, p.x.row_stride, to);
    }
  }
}

/// The same of two dtypes: by way of f32.
void norm_rows_widened(const NormProblem& p, const Gains& g, int64_t first, const MutableMatrix& y) {
  const Scratch lines(kNormRows * p.x.cols);
  NormProblem part = p;
  part.x = {lines.get(), DType::f32, kNormRows, p.x.cols, p.x.cols};
  const MutableMatrix out{lines.get(), DType::f32, 0, p.x.cols, p.x.cols};
  for (int64_t r = 0; r < y.rows; r += kNormRows) {
    MutableMatrix some = out;
    some.rows = std::min<int64_t>(kNormRows, y.rows - r);
    for (int64_t i = 0; i < some.rows; ++i)
      read_line(p.x.dtype, element_of(p.x, first + r + i, 0), p.x.cols, lines.get() + i * p.x.cols);
    if (p.mean) part.mean = p.mean + first + r;
    if (p.rstd) part.rstd = p.rstd + first + r;
    norm_rows<DType::f32>(part, g, 0, some);
    for (int64_t i = 0; i < some.rows; ++i)
      write_line(y.dtype, lines.get() + i * p.x.cols, p.x.cols, rows_of(y, r + i, 1).data);
  }
}

void norm(const NormProblem& p) {
  const FloatMode mode;
  const int64_t count = p.x.cols;
  const std::vector<float> gamma = widened(p.gamma, count, p.zero_centered);
  const std::vector<float> beta = p.beta.data ? widened(p.beta, count, false) : std::vector<float>();
  const auto finite = [](const std::vector<float>& v) {
    return line_magnitude<DType::f32, false>(v.data(), std::ssize(v)) < kInfinity<DType::f32>;
  };
  const Gains gains{gamma.data(), p.beta.data ? beta.data() : nullptr, p.eps >= 0 && finite(gamma) && finite(beta)};
  produce(p.out, [&](int64_t first, const MutableMatrix& y) {
    if (p.x.dtype != y.dtype) return norm_rows_widened(p, gains, first, y);
    with_dtype(y.dtype, [&](auto d) { norm_rows<d>(p, gains, first, y); });
  });
}

/// Rows of gradients whose sums are found together.
constexpr int kGradRows = 2;

/// Rows of dy and x, all of one dtype, and what the norm made of them.
template <DType D>
struct GradRows {
  const Plain<D>*dy[kGradRows], *x[kGradRows];
  Moments m[kGradRows];
  float c1[kGradRows] = {}, c2[kGradRows];
};

/// Where terms of dgamma and dbeta are added.
struct GradSums {
  float *dgamma, *dbeta;
};

/// The same for one element of one row, and the row's own sums: numbers or lanes of them.
template <class T>
struct ElementSums {
  T &w, &wx, &dgamma, &dbeta;
};

/// Adds the terms of the first `rows` rows to the sums over rows, in order, and finds c1 and c2 (numerics.md 11.2).
template <DType D, bool kLayer, int kRows>
inline void add_grad_rows(const float* gamma, int64_t count, const GradSums& sums, GradRows<D>& rows) {
  constexpr int vectors = kPartialSums / kLanes;
  const auto add = [&](int i, auto dy, auto x, auto g, auto to) {
    const auto normalized = (x - rows.m[i].mean) * rows.m[i].rstd, w = dy * g;
    to.dgamma += dy * normalized;
    to.dbeta += dy;
    if constexpr (kLayer) to.w += w;
    to.wx += w * normalized;
  };
  // Whole runs of 16: sums along the row stay in registers, those over rows go through memory.
  F32 w[kRows][vectors] = {}, wx[kRows][vectors] = {};
  int64_t j = 0;
  for (; j + kPartialSums <= count; j += kPartialSums)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const int64_t at = j + v * kLanes;
      F32 dgamma = load(sums.dgamma + at), dbeta = load(sums.dbeta + at);
#pragma GCC unroll 2
      for (int i = 0; i < kRows; ++i)
        add(i, load_as<D>(rows.dy[i] + at), load_as<D>(rows.x[i] + at), load(gamma + at),
            ElementSums{w[i][v], wx[i][v], dgamma, dbeta});
      store(sums.dgamma + at, dgamma);
      store(sums.dbeta + at, dbeta);
    }
  // The rest of each row, then its partial sums by halves.
  const float n = static_cast<float>(std::max<int64_t>(1, count));
  for (int i = 0; i < kRows; ++i) {
    float s[kPartialSums], sx[kPartialSums];
    for (int v = 0; v < vectors; ++v) store(s + v * kLanes, w[i][v]), store(sx + v * kLanes, wx[i][v]);
    for (int64_t l = 0; j + l < count; ++l)
      add(i, widen<D>(rows.dy[i][j + l]), widen<D>(rows.x[i][j + l]), gamma[j + l],
          ElementSums{s[l], sx[l], sums.dgamma[j + l], sums.dbeta[j + l]});
    if (kLayer) rows.c1[i] = sum_of_partial(s) / n;
    rows.c2[i] = sum_of_partial(sx) / n;
  }
}

/// dx of a row; asks for the rows that follow.
template <DType D>
[[gnu::flatten]] inline void write_grad_row(const NormGradProblem& p, const GradRows<D>& rows, int i,
                                            const float* gamma, Plain<D>* to) {
  const int64_t count = p.x.cols;
  const Plain<D>*dy = rows.dy[i], *x = rows.x[i];
  const Moments m = rows.m[i];
  const float c1 = rows.c1[i], c2 = rows.c2[i];
  const auto value = [&](auto d, auto v, auto g) { return (d * g - (c1 + (v - m.mean) * m.rstd * c2)) * m.rstd; };
  const int64_t whole = count / (2 * kLanes) * (2 * kLanes);
  const auto lanes = [&](int64_t j) { return value(load_as<D>(dy + j), load_as<D>(x + j), load(gamma + j)); };
  for (int64_t j = 0; j < whole; j += 2 * kLanes) {
    __builtin_prefetch(dy + kGradRows * p.dy.row_stride + j, 0, 2);
    __builtin_prefetch(x + kGradRows * p.x.row_stride + j, 0, 2);
    store_as<D, Known::nothing>(to + j, lanes(j), lanes(j + kLanes));
  }
  float rest[2 * kLanes];
  for (int64_t j = whole; j < count; ++j) rest[j - whole] = value(widen<D>(dy[j]), widen<D>(x[j]), gamma[j]);
  write_as<D>(rest, count - whole, to + whole);
}

/// kRows rows from row r on, all of one dtype.
template <DType D, int kRows>
[[gnu::flatten]] void norm_grad_rows(const NormGradProblem& p, const float* gamma, int64_t r, const GradSums& sums) {
  const int64_t count = p.x.cols;
  // Two passes over the rows: sums first, which dx needs. The second finds them in a cache.
  GradRows<D> rows;
  for (int i = 0; i < kRows; ++i) {
    rows.dy[i] = static_cast<const Plain<D>*>(element_of(p.dy, r + i, 0));
    rows.x[i] = static_cast<const Plain<D>*>(element_of(p.x, r + i, 0));
    rows.m[i] = {p.kind == NormKind::layer ? p.mean[r + i] : 0.0f, p.rstd[r + i]};
  }
  if (p.kind == NormKind::layer)
    add_grad_rows<D, true, kRows>(gamma, count, sums, rows);
  else
    add_grad_rows<D, false, kRows>(gamma, count, sums, rows);
  for (int i = 0; p.dx.data && i < kRows; ++i)
    write_grad_row<D>(p, rows, i, gamma, static_cast<Plain<D>*>(rows_of(p.dx, r + i, 1).data));
}

/// A row by way of f32.
void norm_grad_row_widened(const NormGradProblem& p, const float* gamma, int64_t r, const GradSums& sums) {
  const int64_t count = p.x.cols;
  const Scratch dy(count), x(count);
  read_line(p.dy.dtype, element_of(p.dy, r, 0), count, dy.get());
  read_line(p.x.dtype, element_of(p.x, r, 0), count, x.get());
  NormGradProblem row = p;
  row.dy = {dy.get(), DType::f32, 1, count, count};
  row.x = {x.get(), DType::f32, 1, count, count};
  if (p.mean) row.mean = p.mean + r;
  row.rstd = p.rstd + r;
  if (p.dx.data) row.dx = {dy.get(), DType::f32, 1, count, count};
  norm_grad_rows<DType::f32, 1>(row, gamma, 0, sums);
  if (p.dx.data) write_line(p.dx.dtype, dy.get(), count, rows_of(p.dx, r, 1).data);
}

/// Rows of one chunk of the sums over rows (6.6): dx of them, and their part of dgamma and dbeta.
void norm_grad_chunk(const NormGradProblem& p, const float* gamma, int64_t chunk, const GradSums& sums) {
  std::fill_n(sums.dgamma, p.x.cols, 0.0f);
  std::fill_n(sums.dbeta, p.x.cols, 0.0f);
  const bool alike = p.x.dtype == p.dy.dtype && (!p.dx.data || p.x.dtype == p.dx.dtype);
  int64_t r = chunk * kSumRows;
  const int64_t last = std::min(r + kSumRows, p.x.rows);
  for (; !alike && r < last; ++r) norm_grad_row_widened(p, gamma, r, sums);
  with_dtype(p.x.dtype, [&](auto d) {
    for (; r + kGradRows <= last; r += kGradRows) norm_grad_rows<d, kGradRows>(p, gamma, r, sums);
    for (; r < last; ++r) norm_grad_rows<d, 1>(p, gamma, r, sums);
  });
}

void norm_grad(const NormGradProblem& p) {
  const FloatMode mode;
  const int64_t count = p.x.cols, chunks = ceil_div(p.x.rows, kSumRows);
  const std::vector<float> gamma = widened(p.gamma, count, p.zero_centered);
  // A chunk of rows is a task and has sums of its own, so that their order does not depend on threads.
  const Scratch parts(2 * chunks * count);
  const float* dbeta = parts.get() + count;
  parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      float* part = parts.get() + 2 * c * count;
      norm_grad_chunk(p, gamma.data(), c, {part, part + count});
    }
  });
  // The sums of chunks, in order.
  if (p.dgamma) sum_chunks(parts.get(), chunks, 2 * count, {p.dgamma, p.gamma.dtype, 1, count, count});
  if (p.dbeta) sum_chunks(dbeta, chunks, 2 * count, {p.dbeta, p.gamma.dtype, 1, count, count});
}
