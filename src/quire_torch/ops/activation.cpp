#include "quire_torch/ops/activation.h"

#include "quire/operations/operations.h"

namespace quire_torch {
namespace {

void activate_groups(const ActivationArgs& a, op::Tensors<7>& out, const quire::Context& context) {
  const MatrixView x(a.x, "activation: x");
  const int64_t rows = x.matrix().rows, cols = a.sizes<int64_t>().back();
  const GroupsView groups(*a.offsets, rows, "activation");
  clear_carrier(a.out(), out[0]);
  const quire::QuantSpec spec = a.spec->value_or(quire::QuantSpec{});
  const auto side_of = [&](size_t first, quire::Direction direction, bool wanted) {
    return wanted ? flat_side(std::span(out).subspan(first, 3), spec, direction, "activation") : FlatSide{};
  };
  const FlatSide rowwise = side_of(1, quire::Direction::rowwise, a.rowwise),
                 columnwise = side_of(4, quire::Direction::columnwise, a.columnwise);
  void* y = a.out().has_y() ? out[0].mutable_data_ptr() : nullptr;
  quire::activation({.activation = *a.activation,
                     .x = x.matrix(),
                     .out = {.y = {y, dtype(a.dtype, "activation: dtype"), rows, cols, cols},
                             .spec = spec,
                             .rowwise = rowwise.side,
                             .columnwise = columnwise.side,
                             .scale = group_scales(a.scale, 1, groups.count(), 0, "activation: scale")},
                     .groups = groups,
                     .room = {.rowwise = rowwise.room, .columnwise = columnwise.room}},
                    context);
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
