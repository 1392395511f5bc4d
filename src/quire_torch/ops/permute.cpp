#include "quire_torch/ops/permute.h"

#include "quire/operations/operations.h"

namespace quire_torch {
namespace {

/// A row map and weights, contiguous for the time of a call.
class MapView {
 public:
  MapView(const at::Tensor& row_map, const op::OptionalTensor& weights)
      : row_map_(row_map.contiguous()), weights_(weights ? weights->contiguous() : at::Tensor()) {}
  quire::RowMap map() const { return {row_map_.const_data_ptr<int32_t>(), row_map_.size(0), row_map_.size(1)}; }
  const float* weights() const { return weights_.defined() ? weights_.const_data_ptr<float>() : nullptr; }

 private:
  at::Tensor row_map_, weights_;
};

}  // namespace

void PermuteFwd::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const MatrixView x(a.x, "permute: x");
  const MapView view(a.row_map, a.weights);
  quire::permute({.from = x.matrix(), .map = view.map(), .weights = view.weights(), .to = mutable_matrix(out[0])},
                 context);
}

void UnpermuteFwd::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const MatrixView y(a.y, "unpermute: y");
  const MapView view(a.row_map, a.weights);
  quire::unpermute({.from = y.matrix(), .map = view.map(), .weights = view.weights(), .to = mutable_matrix(out[0])},
                   context);
}

void UnpermuteDot::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  quire::check(a.x.size(1) == a.y.size(1), "unpermute_dot: x and y must have the same columns; got ", a.x.size(1),
               " and ", a.y.size(1));
  const MatrixView x(a.x, "unpermute_dot: x"), y(a.y, "unpermute_dot: y");
  const MapView view(a.row_map, {});
  quire::permuted_dot(
      {.permuted = y.matrix(), .tokens = x.matrix(), .map = view.map(), .to = out[0].mutable_data_ptr<float>()},
      context);
}

op::Tensors<1> Permute::inference(const Args& a) { return op::call<PermuteFwd>(a); }

std::pair<op::Tensors<1>, Permute::Saved> Permute::forward(const Args& a, op::Needs need) {
  Saved saved{.x = {}, .row_map = a.row_map, .weights = a.weights};
  if (need[2]) saved.x = a.x;
  return {inference(a), std::move(saved)};
}

op::Tensors<3> Permute::backward(const Saved& s, const op::Tensors<1>& grads, op::Needs need) {
  op::Tensors<3> out;
  if (need[0]) out[0] = op::call<UnpermuteFwd>({.y = grads[0], .row_map = s.row_map, .weights = s.weights})[0];
  if (need[2]) out[2] = op::call<UnpermuteDot>({.y = grads[0], .row_map = s.row_map, .x = *s.x})[0];
  return out;
}

op::Tensors<1> Unpermute::inference(const Args& a) { return op::call<UnpermuteFwd>(a); }

std::pair<op::Tensors<1>, Unpermute::Saved> Unpermute::forward(const Args& a, op::Needs need) {
  Saved saved{.y = {}, .row_map = a.row_map, .weights = a.weights, .rows = a.y.sym_size(0)};
  if (need[2]) saved.y = a.y;
  return {inference(a), std::move(saved)};
}

op::Tensors<3> Unpermute::backward(const Saved& s, const op::Tensors<1>& grads, op::Needs need) {
  op::Tensors<3> out;
  if (need[0])
    out[0] = op::call<PermuteFwd>({.x = grads[0], .row_map = s.row_map, .weights = s.weights, .rows = s.rows})[0];
  if (need[2]) out[2] = op::call<UnpermuteDot>({.y = *s.y, .row_map = s.row_map, .x = grads[0]})[0];
  return out;
}

}  // namespace quire_torch
