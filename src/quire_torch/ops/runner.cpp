#include "quire_torch/ops/runner.h"

#include "quire_torch/bridge/observe.h"
#include "quire_torch/ops/tensor_runner.h"

namespace quire_torch {
namespace {

using quire::RegisteredRunner, quire::RunnerRequest;

/// Tells an explanation which runner takes a call.
void note_runner(const RegisteredRunner& r, const RunnerRequest& request) {
  const quire::RunnerInfo& info = r.runner->info();
  const quire::Matrix& x = request.call.x;
  const std::string choices = request.call.top_k > 0 ? quire::text(", ", request.call.top_k, " experts a token,") : "";
  note_step(quire::text("runner\t\t", request.op, " bfloat16 [", x.rows, ", ", x.cols, "]", choices, " by runner ",
                        r.handle, r.name.empty() ? "" : " '" + r.name + "'", ": ", info.description));
}

/// The runner computes y of inputs, whose views the request holds.
void compute(const RegisteredRunner& registered, RunnerRequest request, const std::vector<at::Tensor>& inputs,
             at::Tensor& y, const quire::Context& context) {
  const MatrixView x(inputs[0],
                     request.kind == quire::RunnerKind::moe ? "nvfp4_moe: hidden_states" : "nvfp4_linear: x");
  request.call.x = x.matrix();
  request.call.out = mutable_matrix(y);
  request.call.context = context;
  check_request(registered, request);
  if (context.observer) note_runner(registered, request);
  if (request.call.x.rows == 0) return;
  if (auto* runner = dynamic_cast<TensorRunner*>(registered.runner.get()))
    runner->run(inputs, y);
  else
    registered.runner->run(request.call);
}

/// Same for a mixture of experts: hidden_states, topk_weights and topk_ids, the latter two contiguous.
void compute_moe(const RegisteredRunner& registered, const std::vector<at::Tensor>& inputs, at::Tensor& y,
                 const quire::Context& context) {
  RunnerRequest request{.op = "nvfp4_moe", .kind = quire::RunnerKind::moe, .call = {}};
  request.call.expert_weights = inputs[1].const_data_ptr<float>();
  request.call.expert_ids = inputs[2].const_data_ptr<int32_t>();
  request.call.top_k = inputs[2].size(1);
  compute(registered, request, inputs, y, context);
}

}  // namespace

quire::RegisteredRunnerPtr find_runner(const char* op, const c10::SymInt& handle) {
  return quire::find_runner(op, op::as<int64_t>(handle));
}

quire::RegisteredRunnerPtr find_runner(const char* op, const RunnerNameText& name) {
  std::atomic<int64_t>& kept = *name->handle;
  if (auto found = quire::registered_runner(kept.load(std::memory_order_relaxed))) return found;
  auto found = quire::find_runner(op, std::string_view(name->name));
  kept.store(found->handle, std::memory_order_relaxed);
  return found;
}

template <class Which>
void Nvfp4Linear<Which>::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const auto runner = find_runner("nvfp4_linear", a.runner);
  compute(*runner, {.op = "nvfp4_linear", .kind = quire::RunnerKind::linear, .call = {}}, {a.x}, out[0], context);
}

template <class Which>
void Nvfp4Moe<Which>::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const auto runner = find_runner("nvfp4_moe", a.runner);
  compute_moe(*runner, {a.hidden_states, a.topk_weights.contiguous(), a.topk_ids.contiguous()}, out[0], context);
}

template <class Which>
void Nvfp4MoeRouted<Which>::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const auto runner = find_runner("nvfp4_moe", a.runner);
  const quire::RunnerInfo& info = runner->runner->info();
  const int64_t experts = a.router_logits.size(1);
  quire::check(info.kind != quire::RunnerKind::moe || experts == info.experts, "nvfp4_moe: runner ", runner->handle,
               " has ", info.experts, " experts; got router_logits of ", experts, "; pass a logit for each");
  auto [weights, ids] = op::call<RouteFwd>(a.route());
  if (context.observer)
    note_step(quire::text("moe\t\troute ", a.routing.text(), " of ",
                          name(dtype(a.router_logits.scalar_type(), "nvfp4_moe")), " [", a.router_logits.size(0), ", ",
                          experts, "]"));
  compute_moe(*runner, {a.hidden_states, std::move(weights), std::move(ids)}, out[0], context);
}

template struct Nvfp4Linear<c10::SymInt>;
template struct Nvfp4Linear<RunnerNameText>;
template struct Nvfp4Moe<c10::SymInt>;
template struct Nvfp4Moe<RunnerNameText>;
template struct Nvfp4MoeRouted<c10::SymInt>;
template struct Nvfp4MoeRouted<RunnerNameText>;

}  // namespace quire_torch
