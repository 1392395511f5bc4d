#include "quire_torch/ops/norm.h"

#include "quire/operations/operations.h"

namespace quire_torch {
namespace {

quire::Vector vector(const std::optional<MatrixView>& v) {
  return v ? quire::Vector{v->matrix().data, v->matrix().dtype} : quire::Vector{};
}

float* floats(at::Tensor& t) { return t.numel() ? t.mutable_data_ptr<float>() : nullptr; }

/// What the norm kept of its rows: float32 [rows].
const float* kept_moments(const at::Tensor& t, int64_t rows, const char* what) {
  quire::check(t.scalar_type() == at::kFloat && t.is_contiguous() && t.numel() == rows, "norm_bwd: ", what,
               " must be what norm_fwd returned: contiguous float32 [", rows, "], got ", t.scalar_type(), " ",
               t.sizes());
  return t.const_data_ptr<float>();
}

}  // namespace

Normalization Normalization::parse(std::string_view text) {
  for (const auto kind : {quire::NormKind::layer, quire::NormKind::rms})
    if (quire::name(kind) == text) return {kind};
  quire::fail("norm: normalization must be 'LayerNorm' or 'RMSNorm', got '", text, "'");
}

void NormFwd::run(const Args& a, op::Tensors<9>& out, const quire::Context& context) {
  const MatrixView x(a.x, "norm: x");
  const std::optional<MatrixView> gamma(std::in_place, a.weight, "norm: weight");
  std::optional<MatrixView> beta;
  if (a.bias) beta.emplace(*a.bias, "norm: bias");
  const quire::Matrix& m = x.matrix();
  quire::norm({.kind = a.normalization.kind,
               .x = m,
               .gamma = vector(gamma),
               .beta = vector(beta),
               .zero_centered = a.zero_centered,
               .eps = static_cast<float>(a.eps),
               .out = destination(a.out(), out.data(), m.rows, m.cols, "norm"),
               .mean = floats(out[7]),
               .rstd = floats(out[8])},
              context);
}

void NormBwd::run(const Args& a, op::Tensors<3>& out, const quire::Context& context) {
  quire::check(a.dy.sizes() == a.x.sizes(), "norm_bwd: dy must have the sizes of x, ", a.x.sizes(), ", got ",
               a.dy.sizes());
  const MatrixView x(a.x, "norm_bwd: x"), dy(a.dy, "norm_bwd: dy");
  const std::optional<MatrixView> gamma(std::in_place, a.weight, "norm_bwd: weight");
  const int64_t rows = x.matrix().rows;
  quire::norm_grad(
      {.kind = a.normalization.kind,
       .dy = dy.matrix(),
       .x = x.matrix(),
       .gamma = vector(gamma),
       .zero_centered = a.zero_centered,
       .mean = a.normalization.kind == quire::NormKind::layer ? kept_moments(a.mean, rows, "mean") : nullptr,
       .rstd = kept_moments(a.rstd, rows, "rstd"),
       .dx = a.needs & kNeedsNormX ? mutable_matrix(out[0]) : quire::MutableMatrix{},
       .dgamma = a.needs & kNeedsNormWeight ? out[1].mutable_data_ptr() : nullptr,
       .dbeta = a.needs & kNeedsNormBias ? out[2].mutable_data_ptr() : nullptr},
      context);
}

op::Tensors<7> Norm::inference(const Args& a) {
  auto r = op::call<NormFwd>(a);
  return with_carrier(a.out(), r.data(), a.x.sym_sizes());
}

std::pair<op::Tensors<7>, Norm::Saved> Norm::forward(const Args& a, op::Needs) {
  auto r = op::call<NormFwd>(a);
  Saved saved{.x = a.x,
              .weight = a.weight,
              .mean = r[7],
              .rstd = r[8],
              .normalization = a.normalization,
              .zero_centered = a.zero_centered};
  return {with_carrier(a.out(), r.data(), a.x.sym_sizes()), std::move(saved)};
}

op::Tensors<4> Norm::backward(const Saved& s, const op::Tensors<7>& grads, op::Needs need) {
  const int64_t needs = (need[0] ? kNeedsNormX : 0) | (need[1] ? kNeedsNormWeight : 0) | (need[2] ? kNeedsNormBias : 0);
  auto g = op::call<NormBwd>({.dy = grads[0],
                              .x = s.x,
                              .weight = s.weight,
                              .mean = s.mean,
                              .rstd = s.rstd,
                              .normalization = s.normalization,
                              .zero_centered = s.zero_centered,
                              .needs = needs});
  return {g[0], g[1], g[2], {}};
}

}  // namespace quire_torch
