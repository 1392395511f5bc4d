#include "quire_torch/ops/linear_bwd.h"

#include <ATen/ops/add.h>

#include <algorithm>

#include "quire/gemm/gemm.h"
#include "quire_torch/ops/state.h"

namespace quire_torch {
namespace {

using quire::Direction;

BufferTensors columnwise(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& amax) {
  return {at::Tensor(), at::Tensor(), at::Tensor(), data, scale, amax};
}

/// Quantizes dy; where it is kept, its columnwise buffers are the results of the operator.
BufferTensors quantize_dy(const LinearBwd::Args& a, op::Tensors<6>& out, const quire::Context& context) {
  BufferTensors into;
  if (a.needs & kKeepsDy) {
    for (size_t i = 3; i < 6; ++i) into[i] = out[i];
  }
  const bool keeps = (a.needs & (kNeedsW | kKeepsDy)) != 0;
  const BufferTensors dy = quantize_operand(a.dy,
                                            {.what = "linear_bwd: dy",
                                             .role = "dy",
                                             .spec = a.recipe->dy,
                                             .rowwise = (a.needs & kNeedsX) != 0,
                                             .columnwise = keeps,
                                             .random = randomness(a.recipe->dy, a.sr_state),
                                             .scale = &a.dy_scale},
                                            context, into);
  if (a.dy_scale && !(a.needs & kKeepsDy)) out[5].copy_(dy[keeps ? 5 : 2]);
  return dy;
}

/// dw = dy columnwise * x columnwise.
quire::GemmProblem weight_gradient(const quire::LinearSpec& recipe, const BufferTensors& dy, const BufferTensors& x,
                                   int64_t tokens, at::Tensor dw) {
  return {.a = operand(dy, recipe.dy, Direction::columnwise, tokens, dw.size(0)),
          .b = operand(x, recipe.x, Direction::columnwise, tokens, dw.size(1)),
          .out = mutable_matrix(dw),
          .role = quire::kWgrad};
}

}  // namespace

void check_main_grad(const at::Tensor& t, const char* what) {
  quire::check(t.dim() == 2 && t.is_contiguous() && dtype(t.scalar_type(), what) != quire::DType::u8, what,
               " must be a contiguous float32, float16 or bfloat16 matrix [out_features, in_features], got ",
               t.scalar_type(), " ", t.sizes(), t.is_contiguous() ? "" : " (not contiguous)");
}

quire::Randomness randomness(const quire::QuantSpec& dy, const std::optional<at::Tensor>& sr_state) {
  if (!dy.stochastic) return {};
  if (!sr_state)
    quire::fail("linear_bwd: dy rounds stochastically under '", dy.to_string(),
                "' and needs sr_state, an int64 [2] tensor {seed, counter}; got none");
  check_sr_state(*sr_state);
  return {.columnwise_offset = 1, .state = sr_state->const_data_ptr<int64_t>()};
}

void LinearBwd::run(const Args& a, op::Tensors<6>& out, const quire::Context& context) {
  const int64_t n = a.dy.size(-1), k = op::as<int64_t>(a.in_features);
  const auto sizes = shape<int64_t>(a.dy);
  const int64_t rows = quire::product(sizes, 0, sizes.size() - 1);
  const BufferTensors x = columnwise(a.x_data, a.x_scale, a.x_amax), w = columnwise(a.w_data, a.w_scale, a.w_amax);
  if (a.needs & kNeedsX) check_saved(w, a.recipe->w, {n, k}, "linear_bwd: w");
  if (a.needs & kNeedsW) check_saved(x, a.recipe->x, {rows, k}, "linear_bwd: x");
  if (a.needs & (kNeedsX | kNeedsW | kKeepsDy)) {
    const BufferTensors dy = quantize_dy(a, out, context);
    if (a.needs & kNeedsX)
      quire::gemm({.a = operand(dy, a.recipe->dy, Direction::rowwise, rows, n),
                   .b = operand(w, a.recipe->w, Direction::columnwise, n, k),
                   .out = mutable_matrix(out[0]),
                   .role = quire::kDgrad},
                  context);
    if (a.needs & kNeedsW) quire::gemm(weight_gradient(*a.recipe, dy, x, rows, out[1]), context);
  }
  if (a.needs & kNeedsBias) {
    const MatrixView dy(a.dy, "linear_bwd: dy");
    quire::column_sum({.x = dy.matrix(), .out = out[2].mutable_data_ptr(), .out_dtype = dy.matrix().dtype}, context);
  }
}

void check_destination(const at::Tensor& t, c10::SymIntArrayRef weight, const char* op) {
  check_main_grad(t, quire::text(op, ": main_grad").c_str());
  quire::check(t.sym_sizes() == weight, op, ": main_grad must have w's shape ", weight, ", got ", t.sym_sizes());
}

int64_t most_tokens(const at::Tensor& dy_data, const at::Tensor& x_data) {
  constexpr int64_t kEmpty = int64_t{1} << 31;  // rows without columns have no codes
  return std::max(kEmpty, 2 * std::max(dy_data.numel(), x_data.numel()));
}

void check_addend(const at::Tensor& main_grad, const at::Tensor& value, const char* op) {
  check_main_grad(main_grad, quire::text(op, ": main_grad").c_str());
  quire::check(value.sizes() == main_grad.sizes(), op, ": value must have main_grad's shape ", main_grad.sizes(),
               ", got ", value.sizes());
  quire::check(dtype(value.scalar_type(), quire::text(op, ": value").c_str()) != quire::DType::u8, op,
               ": value must be float32, float16 or bfloat16, got ", value.scalar_type(), "; convert it with .to()");
}

void Wgrad::run(const Args& a, const quire::Context& context) {
  const at::Tensor& dw = a.main_grad.value;
  const int64_t tokens = op::as<int64_t>(a.tokens);
  check_main_grad(dw, "wgrad_: main_grad");
  const int64_t most = most_tokens(a.dy_data, a.x_data);
  quire::check(tokens >= 0 && tokens <= most, "wgrad_: tokens must be the rows of x and dy, from 0 to ", most,
               " for these codes; got ", tokens);
  const BufferTensors dy = columnwise(a.dy_data, a.dy_scale, a.dy_amax), x = columnwise(a.x_data, a.x_scale, a.x_amax);
  check_saved(dy, a.recipe->dy, {tokens, dw.size(0)}, "wgrad_: dy");
  check_saved(x, a.recipe->x, {tokens, dw.size(1)}, "wgrad_: x");
  quire::GemmProblem product = weight_gradient(*a.recipe, dy, x, tokens, dw);
  if (!a.overwrite) product.addend = product.out.data;
  quire::gemm(product, context);
}

void Accumulate::run(const Args& a, const quire::Context&) {
  const at::Tensor& dw = a.main_grad.value;
  check_addend(dw, a.value, "accumulate_");
  if (a.overwrite) {
    dw.copy_(a.value);
  } else {
    dw.copy_(at::add(dw.to(at::kFloat), a.value));
  }
}

}  // namespace quire_torch
