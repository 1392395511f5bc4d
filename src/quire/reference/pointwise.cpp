#include "quire/reference/pointwise.h"

#include <functional>
#include <vector>

#include "quire/base/float_mode.h"
#include "quire/reference/quantize.h"
#include "quire/spec/curve.h"
#include "quire/spec/norm.h"

namespace quire::reference {
namespace {

/// y(r, c) = value(r, c), then quantized if that is wanted.
void produce(const Destination& to, const std::function<float(int64_t, int64_t)>& value) {
  QuantizeProblem p = to.quantization();
  MutableMatrix y = to.y;
  std::vector<float> memory(static_cast<size_t>(y.rows * y.cols));
  if (y.data == nullptr) y = {memory.data(), y.dtype, y.rows, y.cols, y.cols};
  for (int64_t r = 0; r < y.rows; ++r)
    for (int64_t c = 0; c < y.cols; ++c) store_element(y, r, c, value(r, c));
  p.x = y;
  quantize(p);
}

/// The sum over rows of a column whose terms are term(r).
template <class Term>
float sum_of_column(int64_t rows, const Term& term) {
  return sum_of_chunks(rows, [&](int64_t chunk) { return sum_of_chunk(chunk, rows, term); });
}

}  // namespace

void norm(const NormProblem& p) {
  const FloatMode mode;
  std::vector<RowMoments> moments;
  for (int64_t r = 0; r < p.x.rows; ++r) {
    moments.push_back(moments_of(p, r, SumOfRow()));
    if (p.mean) p.mean[r] = moments.back().mean;
    if (p.rstd) p.rstd[r] = moments.back().rstd;
  }
  produce(p.out, [&](int64_t r, int64_t c) { return norm_value(p, moments[static_cast<size_t>(r)], r, c); });
}

void norm_grad(const NormGradProblem& p) {
  const FloatMode mode;
  // The sums first: dx may take the place of dy or x.
  for (int64_t c = 0; c < p.x.cols; ++c) {
    const auto dgamma = [&](int64_t r) { return gamma_term(p, r, c); };
    const auto dbeta = [&](int64_t r) { return load_element(p.dy, r, c); };
    if (p.dgamma) store_element(p.dgamma, p.gamma.dtype, c, sum_of_column(p.x.rows, dgamma));
    if (p.dbeta) store_element(p.dbeta, p.gamma.dtype, c, sum_of_column(p.x.rows, dbeta));
  }
  for (int64_t r = 0; p.dx.data && r < p.x.rows; ++r) {
    const RowMoments m = moments_of(p, r);
    const GradMeans means = grad_means(p, m, r, SumOfRow());
    for (int64_t c = 0; c < p.x.cols; ++c)
      store_element(p.dx, r, c, grad_of(gained(p, r, c), normalized(p, m, r, c), m, means));
  }
}

void activation(const ActivationProblem& p) {
  const FloatMode mode;
  produce(p.out, [&](int64_t r, int64_t c) { return activation_at(p.activation, p.x, r, c).value(); });
}

void activation_grad(const ActivationGradProblem& p) {
  const FloatMode mode;
  for (int64_t r = 0; r < p.dy.rows; ++r)
    for (int64_t c = 0; c < p.dy.cols; ++c) {
      const ActivationPoint at = activation_at(p.activation, p.x, r, c);
      const float dy = load_element(p.dy, r, c);
      store_element(p.dx, r, c, at.x_grad(dy));
      if (at.gated) store_element(p.dx, r, p.dy.cols + c, at.up_grad(dy));
    }
}

}  // namespace quire::reference
