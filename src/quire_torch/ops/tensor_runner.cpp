#include "quire_torch/ops/tensor_runner.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <mutex>
#include <utility>

#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire_torch/bridge/context.h"
#include "quire_torch/bridge/tensor.h"

namespace quire_torch {
namespace {

struct Dropped {
  quire::ProcessMutex mutex;
  std::vector<int64_t> functions;
};

Dropped& dropped() {
  static constinit quire::Lazy<Dropped> one;
  return one.get();
}

}  // namespace

void TensorRunner::run(const quire::RunnerCall& call) {
  const at::Device device = device_of(call.context);
  const auto lent = [&](const void* values, at::ScalarType dtype) {
    return tensor_over(values, {call.x.rows, call.top_k}, dtype, device).clone();
  };
  std::vector<at::Tensor> inputs{tensor_over(call.x, device).clone(at::MemoryFormat::Contiguous)};
  if (info().kind == quire::RunnerKind::moe) {
    inputs.push_back(lent(call.expert_weights, at::kFloat));
    inputs.push_back(lent(call.expert_ids, at::kInt));
  }
  at::Tensor out = tensor_over(call.out, device), y = at::empty(out.sizes(), out.options());
  run(inputs, y);
  out.copy_(y);
}

PythonRunner::PythonRunner(quire::RunnerInfo info, int64_t function)
    : TensorRunner(std::move(info)), function_(function) {}

PythonRunner::~PythonRunner() {
  Dropped& d = dropped();
  const std::lock_guard lock(d.mutex);
  d.functions.push_back(function_);
}

void PythonRunner::run(const std::vector<at::Tensor>& inputs, at::Tensor& y) {
  static constinit quire::Lazy<const c10::OperatorHandle> found;
  const c10::OperatorHandle& op =
      found.get([] { return c10::Dispatcher::singleton().findSchemaOrThrow("quire::runner_call_python", ""); });
  torch::jit::Stack stack{function_, inputs};
  op.callBoxed(stack);
  const at::Tensor& made = stack.back().toTensor();
  if (made.sizes() != y.sizes() || made.scalar_type() != y.scalar_type() || made.device() != y.device())
    quire::fail("runner: the Python function must return ", y.scalar_type(), " ", y.sizes(), " on ", y.device(),
                ", got ", made.scalar_type(), " ", made.sizes(), " on ", made.device());
  y.copy_(made);
}

std::vector<int64_t> dropped_python_functions() {
  Dropped& d = dropped();
  const std::lock_guard lock(d.mutex);
  return std::exchange(d.functions, {});
}

}  // namespace quire_torch
