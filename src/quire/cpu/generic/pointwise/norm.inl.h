// LayerNorm and RMSNorm, and their gradients (numerics.md 11.2).
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/gemm/column_sum.inl.h"
#include "quire/cpu/generic/pointwise/produce.inl.h"

/// Partial sums of a row: element j goes to sum j mod 16. The number is that of the contract, not of a vector's lanes.
constexpr int64_t kPartialSums = 16;

/// Sum over j of term(a[j], b[j]), where term takes two floats or two vectors of them: the partial sums in order, then
/// their halves added until one is left.
template <class Term>
inline float sum_of(const float* a, const float* b, int64_t count, const Term& term) {
  F32 sums[kPartialSums / kLanes] = {};
  int64_t j = 0;
  for (; j + kPartialSums <= count; j += kPartialSums)
    for (int64_t v = 0; v < kPartialSums / kLanes; ++v)
      sums[v] += term(load(a + j + v * kLanes), load(b + j + v * kLanes));
  float s[kPartialSums];
  for (int64_t v = 0; v < kPartialSums / kLanes; ++v) store(s + v * kLanes, sums[v]);
  for (int64_t l = 0; j + l < count; ++l) s[l] += term(a[j + l], b[j + l]);
  for (int64_t half = kPartialSums / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) s[l] += s[l + half];
  return s[0];
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

[[gnu::flatten]] inline Moments moments(NormKind kind, const float* x, int64_t count, float eps) {
  const float n = static_cast<float>(std::max<int64_t>(1, count));
  const float mean = kind == NormKind::layer ? sum_of(x, x, count, [](auto v, auto) { return v; }) / n : 0.0f;
  const float squares = sum_of(x, x, count, [mean](auto v, auto) {
    const auto d = v - mean;
    return d * d;
  });
  return {mean, 1.0f / std::sqrt(squares / n + eps)};
}

[[gnu::flatten]] inline void normalize(const Moments& m, const float* gamma, const float* beta, int64_t count,
                                       float* line) {
  for (int64_t j = 0; j < count; ++j) line[j] = ((line[j] - m.mean) * m.rstd) * gamma[j];
  if (beta)
    for (int64_t j = 0; j < count; ++j) line[j] += beta[j];
}

void norm(const NormProblem& p) {
  const FloatMode mode;
  const int64_t count = p.x.cols;
  const std::vector<float> gamma = widened(p.gamma, count, p.zero_centered);
  const std::vector<float> beta = p.beta.data ? widened(p.beta, count, false) : std::vector<float>();
  produce(p.out, [&](int64_t first, const MutableMatrix& y) {
    const Scratch line(count);
    for (int64_t r = 0; r < y.rows; ++r) {
      read_line(p.x.dtype, element_of(p.x, first + r, 0), count, line.get());
      const Moments m = moments(p.kind, line.get(), count, p.eps);
      if (p.mean) p.mean[first + r] = m.mean;
      if (p.rstd) p.rstd[first + r] = m.rstd;
      normalize(m, gamma.data(), beta.empty() ? nullptr : beta.data(), count, line.get());
      write_line(y.dtype, line.get(), count, rows_of(y, r, 1).data);
    }
  });
}

/// A row of the gradient in f32, and where its terms of dgamma and dbeta are added.
struct GradRow {
  NormKind kind;
  int64_t count;
  const float* gamma;
  float *dy, *x;  ///< read; dx is left in dy
  float *dgamma, *dbeta;
};

[[gnu::flatten]] inline void norm_grad_row(const GradRow& row, const Moments& m) {
  const int64_t count = row.count;
  const float* gamma = row.gamma;
  float* __restrict dy = row.dy, * __restrict x = row.x;
  float* __restrict dgamma = row.dgamma, * __restrict dbeta = row.dbeta;
  for (int64_t j = 0; j < count; ++j) {
    x[j] = (x[j] - m.mean) * m.rstd;
    dgamma[j] += dy[j] * x[j];
    dbeta[j] += dy[j];
    dy[j] *= gamma[j];
  }
  const float n = static_cast<float>(std::max<int64_t>(1, count));
  const float c1 = row.kind == NormKind::layer ? sum_of(dy, x, count, [](auto g, auto) { return g; }) / n : 0.0f;
  const float c2 = sum_of(dy, x, count, [](auto g, auto v) { return g * v; }) / n;
  for (int64_t j = 0; j < count; ++j) dy[j] = (dy[j] - (c1 + x[j] * c2)) * m.rstd;
}

/// Rows of one chunk of the sums over rows (6.6): dx of them, and their part of dgamma and dbeta.
void norm_grad_chunk(const NormGradProblem& p, const float* gamma, int64_t chunk, float* dgamma, float* dbeta) {
  const int64_t count = p.x.cols;
  const Scratch dy(count), x(count);
  std::fill_n(dgamma, count, 0.0f);
  std::fill_n(dbeta, count, 0.0f);
  for (int64_t r = chunk * kSumRows; r < std::min((chunk + 1) * kSumRows, p.x.rows); ++r) {
    read_line(p.dy.dtype, element_of(p.dy, r, 0), count, dy.get());
    read_line(p.x.dtype, element_of(p.x, r, 0), count, x.get());
    const Moments m{p.kind == NormKind::layer ? p.mean[r] : 0.0f, p.rstd[r]};
    norm_grad_row({p.kind, count, gamma, dy.get(), x.get(), dgamma, dbeta}, m);
    if (p.dx.data) write_line(p.dx.dtype, dy.get(), count, rows_of(p.dx, r, 1).data);
  }
}

void norm_grad(const NormGradProblem& p) {
  const FloatMode mode;
  const int64_t count = p.x.cols, chunks = ceil_div(p.x.rows, kSumRows);
  const std::vector<float> gamma = widened(p.gamma, count, p.zero_centered);
  const Scratch parts(2 * chunks * count);
  const float* dbeta = parts.get() + count;
  parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      float* part = parts.get() + 2 * c * count;
      norm_grad_chunk(p, gamma.data(), c, part, part + count);
    }
  });
  if (p.dgamma) sum_chunks(parts.get(), chunks, 2 * count, {p.dgamma, p.gamma.dtype, 1, count, count});
  if (p.dbeta) sum_chunks(dbeta, chunks, 2 * count, {p.dbeta, p.gamma.dtype, 1, count, count});
}
