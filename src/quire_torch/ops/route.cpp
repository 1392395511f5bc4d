#include "quire_torch/ops/route.h"

#include "quire/operations/operations.h"

namespace quire_torch {

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

void RouteBwd::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  for (const at::Tensor* t : {&a.dweights, &a.topk_ids}) {
    auto expected = a.logits.sizes().vec();
    expected.back() = a.routing->topk;
    quire::check(t->sizes() == expected && t->scalar_type() == (t == &a.dweights ? at::kFloat : at::kInt),
                 "route_bwd: dweights and topk_ids must be float32 and int32 ", at::IntArrayRef(expected), ", got ",
                 t->scalar_type(), " ", t->sizes());
  }
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
