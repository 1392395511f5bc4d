// LayerNorm and RMSNorm and their gradients, a row and an element at a time (numerics.md 11.2): the reference of every
// device. sum(count, term): the sum of term(j) over a row, in the order of SumOfRow.
#pragma once

#include <cmath>

#include "quire/spec/matrix_element.h"
#include "quire/spec/pointwise_problem.h"
#include "quire/spec/sums.h"

namespace quire {

/// What the elements of a row have in common.
struct RowMoments {
  float mean = 0, rstd = 0;
};

/// gamma, or gamma + 1.
QUIRE_HOST_DEVICE inline float gain_of(const Vector& gamma, bool zero_centered, int64_t col) {
  const float g = load_element(gamma, col);
  return zero_centered ? g + 1.0f : g;
}

template <class Sum>
QUIRE_HOST_DEVICE RowMoments moments_of(const NormProblem& p, int64_t row, const Sum& sum) {
  const int64_t count = p.x.cols;
  const auto x = [&](int64_t j) { return load_element(p.x, row, j); };
  RowMoments m;
  if (p.kind == NormKind::layer) m.mean = mean_of(sum(count, x), count);
  const float squares = sum(count, [&](int64_t j) {
    const float difference = x(j) - m.mean;
    return difference * difference;
  });
  m.rstd = 1.0f / std::sqrt(mean_of(squares, count) + p.eps);
  return m;
}

/// x without what its row has in common.
constexpr float normalized_of(float x, const RowMoments& m) { return (x - m.mean) * m.rstd; }

/// An element of y before its rounding.
QUIRE_HOST_DEVICE inline float norm_value(const NormProblem& p, const RowMoments& m, int64_t row, int64_t col) {
  const float y = normalized_of(load_element(p.x, row, col), m) * gain_of(p.gamma, p.zero_centered, col);
  return p.beta.data ? y + load_element(p.beta, col) : y;
}

/// The moments that the norm gave.
QUIRE_HOST_DEVICE inline RowMoments moments_of(const NormGradProblem& p, int64_t row) {
  return {p.kind == NormKind::layer ? p.mean[row] : 0.0f, p.rstd[row]};
}

QUIRE_HOST_DEVICE inline float normalized(const NormGradProblem& p, const RowMoments& m, int64_t row, int64_t col) {
  return normalized_of(load_element(p.x, row, col), m);
}

/// The gradient of an element that has been normalized.
QUIRE_HOST_DEVICE inline float gained(const NormGradProblem& p, int64_t row, int64_t col) {
  return load_element(p.dy, row, col) * gain_of(p.gamma, p.zero_centered, col);
}

/// c1 and c2 of a row.
struct GradMeans {
  float c1 = 0, c2 = 0;
};

template <class Sum>
QUIRE_HOST_DEVICE GradMeans grad_means(const NormGradProblem& p, const RowMoments& m, int64_t row, const Sum& sum) {
  const int64_t count = p.x.cols;
  const auto w = [&](int64_t j) { return gained(p, row, j); };
  GradMeans c;
  if (p.kind == NormKind::layer) c.c1 = mean_of(sum(count, w), count);
  c.c2 = mean_of(sum(count, [&](int64_t j) { return w(j) * normalized(p, m, row, j); }), count);
  return c;
}

/// An element of dx before its rounding, of the numbers of gained() and normalized().
constexpr float grad_of(float w, float xh, const RowMoments& m, const GradMeans& c) {
  return (w - (c.c1 + xh * c.c2)) * m.rstd;
}

/// A term of dgamma.
constexpr float gamma_term_of(float dy, float x, const RowMoments& m) { return dy * normalized_of(x, m); }
QUIRE_HOST_DEVICE inline float gamma_term(const NormGradProblem& p, int64_t row, int64_t col) {
  return gamma_term_of(load_element(p.dy, row, col), load_element(p.x, row, col), moments_of(p, row));
}

}  // namespace quire
