#include "quire_torch/ops/linear_fwd.h"

#include <algorithm>
#include <span>

#include "quire/gemm/gemm.h"
#include "quire/quantize/fingerprint.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// Quantizes an operand; its columnwise buffers are the results `kept` of the operator where they are saved.
BufferTensors make_operand(const at::Tensor& t, const QuantizeRole& q, const quire::Context& context,
                           std::span<at::Tensor> kept) {
  BufferTensors into;
  if (q.columnwise) std::copy(kept.begin(), kept.end(), into.begin() + 3);
  return quantize_operand(t, q, context, into);
}

/// Codes that are kept over steps are refused once their tensor has changed, however it was written.
void check_fresh(const LinearFwd::Args& a, const quire::Context& context) {
  if (!a.w_fingerprint) return;
  const at::Tensor& kept = *a.w_fingerprint;
  quire::check(
      kept.scalar_type() == at::kLong && kept.numel() == 1 && a.w.has_value(),
      "linear: w_fingerprint must be what quire::fingerprint(w) returned, int64 of size [1], and w be given; got ",
      kept.scalar_type(), " ", kept.sizes());
  const MatrixView w(*a.w, "linear: w");
  quire::fingerprint({.x = w.matrix(), .expected = kept.const_data_ptr<int64_t>(), .what = "linear"}, context);
}

}  // namespace

void LinearFwd::run(const Args& a, op::Tensors<7>& out, const quire::Context& context) {
  check_fresh(a, context);
  const quire::LinearSpec& recipe = *a.recipe;
  const int64_t n = op::as<int64_t>(a.out_features), k = a.x.size(-1);
  const QuantizeRole x_role{.what = "linear: x",
                            .role = "x",
                            .spec = recipe.x,
                            .rowwise = true,
                            .columnwise = (a.save & kSaveX) && a.x_buffers.empty()};
  const QuantizeRole w_role{.what = "linear: w",
                            .role = "w",
                            .spec = recipe.w,
                            .rowwise = true,
                            .columnwise = (a.save & kSaveW) && a.w_buffers.empty()};
  const BufferTensors x = a.x_buffers.empty() ? make_operand(a.x, x_role, context, std::span(out).subspan(1, 3))
                                              : given_operand(a.x_buffers, shape<int64_t>(a.x), x_role);
  const BufferTensors w = a.w_buffers.empty() ? make_operand(*a.w, w_role, context, std::span(out).subspan(4, 3))
                                              : given_operand(a.w_buffers, {n, k}, w_role);
  std::optional<MatrixView> bias;
  if (a.bias) bias.emplace(*a.bias, "linear: bias");
  const quire::MutableMatrix y = mutable_matrix(out[0]);
  quire::gemm({.a = operand(x, recipe.x, Direction::rowwise, y.rows, k),
               .b = operand(w, recipe.w, Direction::rowwise, n, k),
               .out = y,
               .bias = bias ? bias->matrix().data : nullptr,
               .bias_dtype = bias ? bias->matrix().dtype : quire::DType::f32,
               .role = quire::kFprop},
              context);
}

}  // namespace quire_torch
