#include "quire_torch/ops/tensor_runner.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <mutex>
#include <utility>

#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
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

/// A tensor of its own with the values of lent rows.
at::Tensor copy_of(const quire::Matrix& m) {
  at::Tensor t = at::empty({m.rows, m.cols}, scalar_type(m.dtype));
  const auto row_bytes = static_cast<size_t>(m.cols * size_of(m.dtype));
  for (int64_t i = 0; i < m.rows; ++i)
    std::memcpy(static_cast<char*>(t.mutable_data_ptr()) + static_cast<size_t>(i) * row_bytes,
                static_cast<const char*>(m.data) + i * m.row_stride * size_of(m.dtype), row_bytes);
  return t;
}

template <class T>
at::Tensor copy_of(const T* values, const quire::RunnerCall& call, at::ScalarType dtype) {
  at::Tensor t = at::empty({call.x.rows, call.top_k}, dtype);
  std::copy_n(values, call.x.rows * call.top_k, t.mutable_data_ptr<T>());
  return t;
}

}  // namespace

void TensorRunner::run(const quire::RunnerCall& call) {
  quire::check(info().device == "cpu", "runner: views of memory on ", info().device,
               " are not turned into tensors; call the operator");
  std::vector<at::Tensor> inputs{copy_of(call.x)};
  if (info().kind == quire::RunnerKind::moe) {
    inputs.push_back(copy_of(call.expert_weights, call, at::kFloat));
    inputs.push_back(copy_of(call.expert_ids, call, at::kInt));
  }
  at::Tensor y = at::empty({call.out.rows, call.out.cols}, scalar_type(call.out.dtype));
  run(inputs, y);
  const auto row_bytes = static_cast<size_t>(call.out.cols * size_of(call.out.dtype));
  for (int64_t i = 0; i < call.out.rows; ++i)
    std::memcpy(static_cast<char*>(call.out.data) + i * call.out.row_stride * size_of(call.out.dtype),
                static_cast<const char*>(y.const_data_ptr()) + static_cast<size_t>(i) * row_bytes, row_bytes);
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
