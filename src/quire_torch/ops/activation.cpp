#include "quire_torch/ops/activation.h"

#include "quire_torch/ops/observe.h"

namespace quire_torch {

void ActivationFwd::cpu(const Args& a, op::Tensors<7>& out) {
  const MatrixView x(a.x, "activation: x");
  const int64_t cols = a.sizes<int64_t>().back();
  run(quire::ActivationProblem{.activation = *a.activation,
                               .x = x.matrix(),
                               .out = destination(a.out(), out.data(), x.matrix().rows, cols, "activation")});
}

void ActivationBwd::cpu(const Args& a, op::Tensors<1>& out) {
  const MatrixView x(a.x, "activation_bwd: x"), dy(a.dy, "activation_bwd: dy");
  run(quire::ActivationGradProblem{
      .activation = *a.activation, .dy = dy.matrix(), .x = x.matrix(), .dx = mutable_matrix(out[0])});
}

op::Tensors<7> Activation::inference(const Args& a) {
  auto r = op::call<ActivationFwd>(a);
  return with_carrier(a.out(), r.data(), a.sizes<c10::SymInt>());
}

std::pair<op::Tensors<7>, Activation::Saved> Activation::forward(const Args& a, op::Needs) {
  return {inference(a), {.x = a.x, .activation = a.activation}};
}

op::Tensors<2> Activation::backward(const Saved& s, const op::Tensors<7>& grads, op::Needs) {
  return {op::call<ActivationBwd>({.dy = grads[0], .x = s.x, .activation = s.activation})[0], {}};
}

}  // namespace quire_torch
