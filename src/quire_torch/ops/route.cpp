#include "quire_torch/ops/route.h"

#include "quire/operations/operations.h"
#include "quire_torch/ops/permute.h"

namespace quire_torch {

template <class Int>
std::array<op::Result<Int>, 2> RouteFwd::results(const Args& a) {
  check_input(a.logits, "route: logits");
  if (a.expert_bias) {
    check_input(*a.expert_bias, "route: expert_bias");
    check_one_device(a.expert_bias->device(), a.logits.device(), "route: expert_bias and logits");
    quire::check(a.expert_bias->dim() == 1 && op::size<Int>(*a.expert_bias, 0) == op::size<Int>(a.logits, -1),
                 "route: expert_bias must be [num_experts] = [", op::size<Int>(a.logits, -1),
                 "], the last dimension of logits; got ", op::sizes<Int>(*a.expert_bias));
  }
  op::Result<Int> r{{}, at::kFloat};
  const auto sizes = op::sizes<Int>(a.logits);
  r.sizes.append(sizes.begin(), sizes.end() - 1);
  r.sizes.push_back(Int(a.routing->topk));
  return {r, {r.sizes, at::kInt}};
}
template std::array<op::Result<int64_t>, 2> RouteFwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 2> RouteFwd::results<c10::SymInt>(const Args&);

void RouteFwd::run(const Args& a, op::Tensors<2>& out, const quire::Context& context) {
  const MatrixView logits(a.logits, "route: logits");
  const at::Tensor bias = a.expert_bias ? a.expert_bias->to(at::kFloat).contiguous() : at::Tensor();
  quire::route({.routing = *a.routing,
                .logits = logits.matrix(),
                .bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr,
                .weights = out[0].mutable_data_ptr<float>(),
                .ids = out[1].mutable_data_ptr<int32_t>()},
               context);
}

template <class Int>
std::array<op::Result<Int>, 1> RouteBwd::results(const Args& a) {
  check_input(a.logits, "route_bwd: logits");
  op::Result<Int> r{{}, a.logits.scalar_type()};
  r.sizes.append(op::sizes<Int>(a.logits).begin(), op::sizes<Int>(a.logits).end());
  return {r};
}
template std::array<op::Result<int64_t>, 1> RouteBwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 1> RouteBwd::results<c10::SymInt>(const Args&);

void RouteBwd::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  auto chosen = a.logits.sizes().vec();
  chosen.back() = a.routing->topk;
  for (const auto& [t, dtype] : {std::pair(a.dweights, at::kFloat), std::pair(a.topk_ids, at::kInt)})
    quire::check(t.sizes() == chosen && t.scalar_type() == dtype,
                 "route_bwd: dweights and topk_ids must be float32 and int32 ", at::IntArrayRef(chosen), ", got ",
                 t.scalar_type(), " ", t.sizes());
  const MatrixView logits(a.logits, "route_bwd: logits");
  const at::Tensor dweights = a.dweights.contiguous(), ids = a.topk_ids.contiguous();
  quire::route_grad({.routing = *a.routing,
                     .logits = logits.matrix(),
                     .ids = ids.const_data_ptr<int32_t>(),
                     .dweights = dweights.const_data_ptr<float>(),
                     .dlogits = mutable_matrix(out[0])},
                    context);
}

op::Tensors<2> Route::inference(const Args& a) { return op::call<RouteFwd>(a); }

std::pair<op::Tensors<2>, Route::Saved> Route::forward(const Args& a, op::Needs) {
  auto r = op::call<RouteFwd>(a);
  Saved saved{.logits = a.logits, .topk_ids = r[1], .routing = a.routing};
  return {std::move(r), std::move(saved)};
}

op::Tensors<2> Route::backward(const Saved& s, const op::Tensors<2>& grads, op::Needs) {
  return {
      op::call<RouteBwd>({.dweights = grads[0], .logits = s.logits, .topk_ids = s.topk_ids, .routing = s.routing})[0],
      {}};
}

template <class Int>
std::array<op::Result<Int>, 1> LimitCapacity::results(const Args& a) {
  check_ids(a.topk_ids, "limit_capacity: topk_ids");
  op::Result<Int> r{{}, at::kInt};
  r.sizes.append(op::sizes<Int>(a.topk_ids).begin(), op::sizes<Int>(a.topk_ids).end());
  return {r};
}
template std::array<op::Result<int64_t>, 1> LimitCapacity::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 1> LimitCapacity::results<c10::SymInt>(const Args&);

void LimitCapacity::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const at::Tensor ids = a.topk_ids.contiguous();
  quire::limit_capacity({.ids = ids.const_data_ptr<int32_t>(),
                         .count = ids.numel(),
                         .num_experts = a.num_experts,
                         .capacity = op::as<int64_t>(a.capacity),
                         .kept = out[0].mutable_data_ptr<int32_t>()},
                        context);
}

}  // namespace quire_torch
