#include "quire_torch/ops/linear_fwd.h"

#include "quire/quantize/fingerprint.h"
#include "quire_torch/ops/observe.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// Quantizes an operand; its columnwise buffers go to results `first`.. when they are saved.
BufferTensors make_operand(const at::Tensor& t, QuantizeRole q, op::Tensors<7>& out, size_t first) {
  BufferTensors into;
  if (q.columnwise)
    for (size_t i = 0; i < 3; ++i) into[3 + i] = out[first + i];
  return quantize_operand(t, q, into);
}

/// Codes that are kept over steps are refused once their tensor has changed, however it was written.
void check_fresh(const LinearFwd::Args& a) {
  if (!a.w_fingerprint) return;
  const at::Tensor& kept = *a.w_fingerprint;
  quire::check(
      kept.scalar_type() == at::kLong && kept.numel() == 1 && a.w.has_value(),
      "linear: w_fingerprint must be what quire::fingerprint(w) returned, int64 of size [1], and w be given; got ",
      kept.scalar_type(), " ", kept.sizes());
  const MatrixView w(*a.w, "linear: w");
  check_same_weight(*kept.const_data_ptr<int64_t>(), w.matrix(), "linear");
}

}  // namespace

void check_same_weight(int64_t fingerprint, const quire::Matrix& w, const char* op) {
  quire::check(static_cast<uint64_t>(fingerprint) == quire::fingerprint(w), op,
               ": the weight has changed since it was quantized, so its cached codes are stale; quantize it again "
               "(quire.quantize_weights, or is_first_microbatch=True)");
}

void LinearFwd::cpu(const Args& a, op::Tensors<7>& out) {
  check_fresh(a);
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
  const BufferTensors x =
      a.x_buffers.empty() ? make_operand(a.x, x_role, out, 1) : given_operand(a.x_buffers, shape<int64_t>(a.x), x_role);
  const BufferTensors w =
      a.w_buffers.empty() ? make_operand(*a.w, w_role, out, 4) : given_operand(a.w_buffers, {n, k}, w_role);
  std::optional<MatrixView> bias;
  if (a.bias) bias.emplace(*a.bias, "linear: bias");
  const quire::MutableMatrix y = mutable_matrix(out[0]);
  run(kFprop, quire::GemmProblem{.a = operand(x, recipe.x, Direction::rowwise, y.rows, k),
                                 .b = operand(w, recipe.w, Direction::rowwise, n, k),
                                 .out = y,
                                 .bias = bias ? bias->matrix().data : nullptr,
                                 .bias_dtype = bias ? bias->matrix().dtype : quire::DType::f32});
}

}  // namespace quire_torch
