#include "quire/reference/pointwise.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "quire/base/float_mode.h"
#include "quire/format/element.h"
#include "quire/reference/quantize.h"
#include "quire/spec/curve.h"

namespace quire::reference {
namespace {

using Line = std::vector<float>;

float at(const Matrix& x, int64_t r, int64_t c) { return load_element(x.data, x.dtype, r * x.row_stride + c); }

float at(const Vector& v, int64_t i, bool zero_centered = false) {
  const float x = load_element(v.data, v.dtype, i);
  return zero_centered ? x + 1.0f : x;
}

void store(const MutableMatrix& y, int64_t r, int64_t c, float value) {
  store_element(y.data, y.dtype, r * y.row_stride + c, value);
}

/// y(r, c) = value(r, c), then quantized if that is wanted.
void produce(const Destination& to, const std::function<float(int64_t, int64_t)>& value) {
  QuantizeProblem p = to.quantization();
  MutableMatrix y = to.y;
  std::vector<float> memory(static_cast<size_t>(y.rows * y.cols));
  if (y.data == nullptr) y = {memory.data(), y.dtype, y.rows, y.cols, y.cols};
  for (int64_t r = 0; r < y.rows; ++r)
    for (int64_t c = 0; c < y.cols; ++c) store(y, r, c, value(r, c));
  p.x = y;
  quantize(p);
}

/// Sixteen sums over every sixteenth term, then added by halves.
float sum(const Line& terms) {
  float s[16] = {};
  for (size_t j = 0; j < terms.size(); ++j) s[j % 16] += terms[j];
  for (size_t half = 8; half > 0; half /= 2)
    for (size_t l = 0; l < half; ++l) s[l] += s[l + half];
  return s[0];
}

float average(const Line& terms) { return sum(terms) / static_cast<float>(std::max<size_t>(1, terms.size())); }

/// Sum over rows: in order within chunks of 128, then the chunks in order (numerics.md 6.6).
float sum_rows(const Line& terms) {
  float total = 0;
  for (size_t first = 0; first < terms.size(); first += 128) {
    float part = 0;
    for (size_t r = first; r < std::min(first + 128, terms.size()); ++r) part += terms[r];
    total += part;
  }
  return total;
}

/// A curve's value and slope at an element of x, the factor of a gated activation, and which of the two vary with their
/// argument.
struct Gated {
  CurvePoint point;
  float up = 1;
  bool x_moves = true, up_moves = true;
};

Gated gated_at(const Activation& a, const Matrix& x, int64_t r, int64_t c) {
  Gated out;
  float value = at(x, r, c);
  if (a.row().gated) out.up = at(x, r, x.cols / 2 + c);
  if (a.row().clamped) {
    out.x_moves = !(value > a.limit);
    if (!out.x_moves) value = a.limit;
    out.up_moves = !(out.up > a.limit || out.up < -a.limit);
    if (!out.up_moves) out.up = out.up > 0 ? a.limit : -a.limit;
    out.up += a.offset;
  }
  out.point = point_of(a, value);
  return out;
}

}  // namespace

void norm(const NormProblem& p) {
  const FloatMode mode;
  Line means, rstds;
  for (int64_t r = 0; r < p.x.rows; ++r) {
    Line x(static_cast<size_t>(p.x.cols)), squares(x.size());
    for (size_t j = 0; j < x.size(); ++j) x[j] = at(p.x, r, static_cast<int64_t>(j));
    means.push_back(p.kind == NormKind::layer ? average(x) : 0.0f);
    for (size_t j = 0; j < x.size(); ++j) squares[j] = (x[j] - means.back()) * (x[j] - means.back());
    rstds.push_back(1.0f / std::sqrt(average(squares) + p.eps));
    if (p.mean) p.mean[r] = means.back();
    if (p.rstd) p.rstd[r] = rstds.back();
  }
  produce(p.out, [&](int64_t r, int64_t c) {
    const auto row = static_cast<size_t>(r);
    const float scaled = ((at(p.x, r, c) - means[row]) * rstds[row]) * at(p.gamma, c, p.zero_centered);
    return p.beta.data ? scaled + at(p.beta, c) : scaled;
  });
}

void norm_grad(const NormGradProblem& p) {
  const FloatMode mode;
  const auto rows = static_cast<size_t>(p.x.rows), cols = static_cast<size_t>(p.x.cols);
  std::vector<Line> dgamma(cols, Line(rows)), dbeta = dgamma;
  for (size_t r = 0; r < rows; ++r) {
    const auto row = static_cast<int64_t>(r);
    const float mean = p.kind == NormKind::layer ? p.mean[r] : 0.0f, rstd = p.rstd[r];
    Line x(cols), g(cols), products(cols);
    for (size_t j = 0; j < cols; ++j) {
      const auto col = static_cast<int64_t>(j);
      x[j] = (at(p.x, row, col) - mean) * rstd;
      dgamma[j][r] = at(p.dy, row, col) * x[j];
      dbeta[j][r] = at(p.dy, row, col);
      g[j] = at(p.dy, row, col) * at(p.gamma, col, p.zero_centered);
      products[j] = g[j] * x[j];
    }
    const float c1 = p.kind == NormKind::layer ? average(g) : 0.0f, c2 = average(products);
    for (size_t j = 0; p.dx.data && j < cols; ++j)
      store(p.dx, row, static_cast<int64_t>(j), (g[j] - (c1 + x[j] * c2)) * rstd);
  }
  for (size_t j = 0; j < cols; ++j) {
    const auto col = static_cast<int64_t>(j);
    if (p.dgamma) store_element(p.dgamma, p.gamma.dtype, col, sum_rows(dgamma[j]));
    if (p.dbeta) store_element(p.dbeta, p.gamma.dtype, col, sum_rows(dbeta[j]));
  }
}

void activation(const ActivationProblem& p) {
  const FloatMode mode;
  produce(p.out, [&](int64_t r, int64_t c) {
    const Gated g = gated_at(p.activation, p.x, r, c);
    return p.activation.row().gated ? g.up * g.point.value : g.point.value;
  });
}

void activation_grad(const ActivationGradProblem& p) {
  const FloatMode mode;
  for (int64_t r = 0; r < p.dy.rows; ++r)
    for (int64_t c = 0; c < p.dy.cols; ++c) {
      const Gated g = gated_at(p.activation, p.x, r, c);
      const float dy = at(p.dy, r, c), upstream = p.activation.row().gated ? dy * g.up : dy;
      store(p.dx, r, c, g.x_moves ? upstream * g.point.slope : 0.0f);
      if (p.activation.row().gated) store(p.dx, r, p.dy.cols + c, g.up_moves ? dy * g.point.value : 0.0f);
    }
}

}  // namespace quire::reference
