#include "quire_torch/ops/linear_fwd.h"

#include <ATen/ops/empty.h>

#include "quire/gemm/gemm.h"
#include "quire_torch/ops/operand.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// Quantizes or takes one operand; its columnwise buffers go to results `first`.. when they are saved.
BufferTensors make_operand(const at::Tensor& t, const OptionalTensors& given, QuantizeRole q, op::Tensors<9>& out,
                           size_t first) {
  if (!given.empty()) return given_operand(given, t, q);
  BufferTensors into;
  if (q.columnwise) {
    const auto expected = results(q.spec, shape<int64_t>(t), Direction::columnwise, true);
    for (size_t i = 0; i < 3; ++i) into[3 + i] = out[first + i].view(sizes(expected[i]));
  }
  BufferTensors b = quantize_operand(t, q, into);
  if (q.scale && *q.scale && !q.columnwise) out[first + 2].copy_(b[2]);
  return b;
}

}  // namespace

void LinearFwd::cpu(const Args& a, op::Tensors<9>& out) {
  const quire::LinearSpec& recipe = *a.recipe;
  const BufferTensors x = make_operand(a.x, a.x_buffers,
                                       {.what = "linear: x",
                                        .role = "x",
                                        .spec = recipe.x,
                                        .rowwise = true,
                                        .columnwise = (a.save & kSaveX) && a.x_buffers.empty(),
                                        .scale = &a.x_scale},
                                       out, 3);
  const BufferTensors w = make_operand(a.w, a.w_buffers,
                                       {.what = "linear: w",
                                        .role = "w",
                                        .spec = recipe.w,
                                        .rowwise = true,
                                        .columnwise = (a.save & kSaveW) && a.w_buffers.empty(),
                                        .scale = &a.w_scale},
                                       out, 6);
  at::Tensor y = out[0];
  if (a.output_spec->spec) {
    auto sizes = a.x.sizes().vec();
    sizes.back() = a.w.size(0);
    y = at::empty(sizes, at::TensorOptions().dtype(a.dtype));
  }
  const quire::MutableMatrix ym = mutable_matrix(y);
  const int64_t k = a.w.size(1);
  std::optional<MatrixView> bias;
  if (a.bias) bias.emplace(*a.bias, "linear: bias");
  quire::gemm({.a = operand(x, recipe.x, Direction::rowwise, ym.rows, k),
               .b = operand(w, recipe.w, Direction::rowwise, a.w.size(0), k),
               .out = ym,
               .bias = bias ? bias->matrix().data : nullptr,
               .bias_dtype = bias ? bias->matrix().dtype : quire::DType::f32});
  if (a.output_spec->spec)
    quantize_operand(y, {.what = "linear: y", .role = "y", .spec = *a.output_spec->spec, .rowwise = true},
                     {out[0], out[1], out[2], at::Tensor(), at::Tensor(), at::Tensor()});
}

}  // namespace quire_torch
