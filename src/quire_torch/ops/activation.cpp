#include "quire_torch/ops/activation.h"

#include "quire/pointwise/pointwise.h"

namespace quire_torch {
namespace {

/// Sides of each group in three of the results; none where the direction is absent.
std::vector<quire::Side> sides_of(std::span<at::Tensor> three, const GroupedLayout& layout, bool wanted) {
  if (!wanted) return {};
  clear_unwritten(three, layout);
  return grouped_sides(three, layout, "activation");
}

void activate_groups(const ActivationArgs& a, op::Tensors<7>& out, const quire::Context& context) {
  const MatrixView x(a.x, "activation: x");
  const int64_t cols = a.sizes<int64_t>().back();
  const Groups groups(*a.offsets, x.matrix().rows, "activation");
  clear_carrier(a.out(), out[0]);
  if (a.out().has_y()) zero_beyond(out[0], groups);
  const quire::QuantSpec spec = a.spec->value_or(quire::QuantSpec{});
  const auto rows = sides_of(std::span(out).subspan(1, 3), {spec, groups, cols, quire::Direction::rowwise}, a.rowwise);
  const auto columns =
      sides_of(std::span(out).subspan(4, 3), {spec, groups, cols, quire::Direction::columnwise}, a.columnwise);
  const float* scale = group_scales(a.scale, 1, static_cast<int64_t>(groups.size()), 0, "activation: scale");
  const auto parts = rows_of(x.matrix(), groups);
  const quire::DType y_dtype = dtype(a.dtype, "activation: dtype");
  auto* y = a.out().has_y() ? static_cast<char*>(out[0].mutable_data_ptr()) : nullptr;
  std::vector<quire::ActivationProblem> problems;
  for (size_t e = 0; e < groups.size(); ++e) {
    if (groups.rows(e) == 0) continue;
    void* part = y ? y + groups.begin(e) * cols * size_of(y_dtype) : nullptr;
    problems.push_back({.activation = *a.activation,
                        .x = parts[e],
                        .out = {.y = {part, y_dtype, groups.rows(e), cols, cols},
                                .spec = spec,
                                .rowwise = rows.empty() ? quire::Side{} : rows[e],
                                .columnwise = columns.empty() ? quire::Side{} : columns[e],
                                .scale = scale ? scale + e : nullptr}});
  }
  quire::activation_each(problems, context);
}

}  // namespace

void ActivationFwd::run(const Args& a, op::Tensors<7>& out, const quire::Context& context) {
  if (a.offsets) return activate_groups(a, out, context);
  const MatrixView x(a.x, "activation: x");
  const int64_t cols = a.sizes<int64_t>().back();
  quire::activation({.activation = *a.activation,
                     .x = x.matrix(),
                     .out = destination(a.out(), out.data(), x.matrix().rows, cols, "activation")},
                    context);
}

void ActivationBwd::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const MatrixView x(a.x, "activation_bwd: x"), dy(a.dy, "activation_bwd: dy");
  quire::activation_grad(
      {.activation = *a.activation, .dy = dy.matrix(), .x = x.matrix(), .dx = mutable_matrix(out[0])}, context);
}

op::Tensors<7> Activation::inference(const Args& a) {
  auto r = op::call<ActivationFwd>(a);
  return with_carrier(a.out(), r.data(), a.sizes<c10::SymInt>());
}

std::pair<op::Tensors<7>, Activation::Saved> Activation::forward(const Args& a, op::Needs) {
  return {inference(a), {.x = a.x, .activation = a.activation}};
}

op::Tensors<3> Activation::backward(const Saved& s, const op::Tensors<7>& grads, op::Needs) {
  return {op::call<ActivationBwd>({.dy = grads[0], .x = s.x, .activation = s.activation})[0], {}, {}};
}

}  // namespace quire_torch
