#include "quire_torch/ops/linear_bwd.h"

#include "quire/gemm/gemm.h"
#include "quire/quantize/quantize.h"
#include "quire_torch/ops/operand.h"

namespace quire_torch {
namespace {

using quire::Direction;

quire::Randomness randomness(const LinearBwd::Args& a) {
  if (!a.recipe->dy.stochastic) return {};
  quire::check(a.sr_state.has_value(), "linear_bwd: dy rounds stochastically under '", a.recipe->dy.to_string(),
               "' and needs sr_state, an int64 [2] tensor {seed, counter}; got none");
  check_sr_state(*a.sr_state);
  const int64_t* state = a.sr_state->const_data_ptr<int64_t>();
  const auto seed = static_cast<uint64_t>(state[0]), count = static_cast<uint64_t>(state[1]);
  return {.seed = seed, .rowwise_offset = 2 * count, .columnwise_offset = 2 * count + 1};
}

BufferTensors columnwise(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& amax) {
  return {at::Tensor(), at::Tensor(), at::Tensor(), data, scale, amax};
}

BufferTensors quantize_dy(const LinearBwd::Args& a) {
  const QuantizeRole q{.what = "linear_bwd: dy",
                       .role = "dy",
                       .spec = a.recipe->dy,
                       .rowwise = (a.needs & kNeedsX) != 0,
                       .columnwise = (a.needs & kNeedsW) != 0,
                       .random = randomness(a),
                       .scale = &a.dy_scale};
  return a.dy_buffers.empty() ? quantize_operand(a.dy, q) : given_operand(a.dy_buffers, a.dy, q);
}

void weight_gradient(const LinearBwd::Args& a, const BufferTensors& dy, int64_t rows, at::Tensor& dw) {
  const BufferTensors x = columnwise(a.x_data, a.x_scale, a.x_amax);
  const int64_t n = dw.size(0), k = dw.size(1);
  quire::GemmProblem p{.a = operand(dy, a.recipe->dy, Direction::columnwise, rows, n),
                       .b = operand(x, a.recipe->x, Direction::columnwise, rows, k),
                       .out = mutable_matrix(dw)};
  at::Tensor addend;
  if (a.accumulate) {
    quire::check(a.accumulate->sizes() == dw.sizes(),
                 "linear_bwd: accumulate must be [out_features, in_features] = ", dw.sizes(), ", got ",
                 a.accumulate->sizes());
    addend = a.accumulate->contiguous();
    p.addend = addend.const_data_ptr();
  }
  quire::gemm(p);
}

/// Saved buffers must hold what an operand of [rows, cols] stores: a backward on foreign buffers must not read past
/// them. Their shapes may differ (linear_fwd flattens some), their memory may not.
void check_saved(const BufferTensors& b, const quire::QuantSpec& spec, const quire::Shape<int64_t>& shape,
                 const char* what) {
  const auto expected = results(spec, shape, Direction::columnwise, true);
  for (size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor& t = b[3 + i];
    const int64_t count = c10::multiply_integers(sizes(expected[i]));
    quire::check((t.scalar_type() == expected[i].dtype && t.is_contiguous() && t.numel() == count) ||
                     (count == 0 && t.numel() == 0),
                 what, " must be what linear_fwd returned for it: ", quire::kBufferNames[3 + i], " of ",
                 spec.to_string(), " for ", at::IntArrayRef(shape), " holds ", count, " contiguous ", expected[i].dtype,
                 ", got ", t.scalar_type(), " ", t.sizes());
  }
}

}  // namespace

void LinearBwd::cpu(const Args& a, op::Tensors<4>& out) {
  const int64_t n = a.dy.size(-1), k = op::as<int64_t>(a.in_features);
  const auto sizes = shape<int64_t>(a.dy);
  const int64_t rows = quire::product(sizes, 0, sizes.size() - 1);
  if (a.needs & kNeedsX) check_saved(columnwise(a.w_data, a.w_scale, a.w_amax), a.recipe->w, {n, k}, "linear_bwd: w");
  if (a.needs & kNeedsW)
    check_saved(columnwise(a.x_data, a.x_scale, a.x_amax), a.recipe->x, {rows, k}, "linear_bwd: x");
  if (a.needs & (kNeedsX | kNeedsW)) {
    const BufferTensors dy = quantize_dy(a);
    if (a.needs & kNeedsX) {
      const BufferTensors w = columnwise(a.w_data, a.w_scale, a.w_amax);
      quire::gemm({.a = operand(dy, a.recipe->dy, Direction::rowwise, rows, n),
                   .b = operand(w, a.recipe->w, Direction::columnwise, n, k),
                   .out = mutable_matrix(out[0])});
    }
    if (a.needs & kNeedsW) weight_gradient(a, dy, rows, out[1]);
    if (a.dy_scale) out[3].copy_(dy[a.needs & kNeedsX ? 2 : 5]);
  } else if (a.dy_scale) {
    out[3].zero_();
  }
  if (a.needs & kNeedsBias) {
    const MatrixView dy(a.dy, "linear_bwd: dy");
    quire::column_sum({.x = dy.matrix(), .out = out[2].mutable_data_ptr(), .out_dtype = dy.matrix().dtype});
  }
}

void check_sr_state(const at::Tensor& state) {
  quire::check(state.scalar_type() == at::kLong && state.sizes() == at::IntArrayRef({2}) && state.is_contiguous(),
               "linear: sr_state must be a contiguous int64 [2] tensor {seed, counter}, got ", state.scalar_type(), " ",
               state.sizes());
}

void SrAdvance::cpu(const Args& a) {
  check_sr_state(a.sr_state.value);
  ++static_cast<int64_t*>(a.sr_state.value.mutable_data_ptr())[1];
}

}  // namespace quire_torch
