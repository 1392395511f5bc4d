#include "quire_torch/ops/linear.h"

namespace quire_torch {
namespace {

op::TensorList bias_list(const op::OptionalTensor& bias) { return bias ? op::TensorList{*bias} : op::TensorList(); }

/// The same of one group.
GroupedLinear::Args one_group(const Linear::Args& a) {
  return {.x = a.x,
          .w = {{a.w}},
          .bias = {bias_list(a.bias)},
          .offsets = std::nullopt,
          .recipe = a.recipe,
          .dtype = a.dtype,
          .sr_state = a.sr_state};
}
GroupedLinear::Args one_group(const LinearPrequantized::Args& a) {
  GroupedLinear::Args one = one_group({a.x, a.w, a.bias, a.recipe, a.dtype, a.sr_state});
  one.x_buffers = a.x_buffers;
  one.w_buffers = a.w_buffers;
  one.w_fingerprint = a.w_fingerprint;
  return one;
}

/// y without what a backward pass needs: what nearly every call for inference is, so without the copies of one_group().
op::Tensors<1> product(const LinearFwd::Args& a) { return {op::call<LinearFwd, /*all=*/false>(a)[0]}; }

std::pair<op::Tensors<1>, GroupedLinear::Saved> y_and_saved(const GroupedLinear::Args& a, op::Needs need) {
  auto [results, saved] = GroupedLinear::forward(a, need);
  return {{std::move(results[0])}, std::move(saved)};
}

}  // namespace

op::Tensors<1> Linear::inference(const Args& a) {
  check_agreement(a.x, a.w);
  return product({.x = a.x,
                  .w = {a.w},
                  .bias = bias_list(a.bias),
                  .offsets = std::nullopt,
                  .out_features = a.w.sym_size(0),
                  .recipe = a.recipe,
                  .dtype = a.dtype,
                  .save = 0});
}

op::Tensors<1> LinearPrequantized::inference(const Args& a) {
  check_agreement(a.x, a.w);
  return product({.x = a.x,
                  .w = a.w_buffers.empty() || a.w_fingerprint ? op::TensorList{a.w} : op::TensorList(),
                  .bias = bias_list(a.bias),
                  .offsets = std::nullopt,
                  .out_features = a.w.sym_size(0),
                  .recipe = a.recipe,
                  .dtype = a.dtype,
                  .save = 0,
                  .x_buffers = a.x_buffers,
                  .w_buffers = a.w_buffers,
                  .w_fingerprint = a.w_fingerprint});
}

std::pair<op::Tensors<1>, Linear::Saved> Linear::forward(const Args& a, op::Needs need) {
  return y_and_saved(one_group(a), need);
}
std::pair<op::Tensors<1>, LinearPrequantized::Saved> LinearPrequantized::forward(const Args& a, op::Needs need) {
  return y_and_saved(one_group(a), need);
}

op::Tensors<4> Linear::backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need) {
  auto [dx, dw, dbias] = GroupedLinear::gradients(s, dy[0], need);
  return {std::move(dx), std::move(dw), std::move(dbias), {}};
}
op::Tensors<5> LinearPrequantized::backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need) {
  auto [dx, dw, dbias] = GroupedLinear::gradients(s, dy[0], need);
  return {std::move(dx), std::move(dw), std::move(dbias), {}, {}};
}

}  // namespace quire_torch
