// Runners that compute with tensors instead of views: Python functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "quire/runner/runner.h"

namespace quire_torch {

/// What the operators pass to a runner that wants the tensors themselves, which it may keep, unlike lent memory.
class TensorRunner : public quire::Runner {
 public:
  using Runner::Runner;

  /// Writes y. inputs: x [*, K], or hidden_states, topk_weights and topk_ids.
  virtual void run(const std::vector<at::Tensor>& inputs, at::Tensor& y) = 0;

  /// For callers without tensors: copies of the lent memory.
  void run(const quire::RunnerCall& call) final;
};

/// A Python function that returns y. It is reached through quire::runner_call_python, an operator whose kernel Python
/// registers: so this library needs no Python, the interpreter's lock is taken by PyTorch, and what the function raises
/// reaches the caller as it is.
class PythonRunner final : public TensorRunner {
 public:
  /// function: its number in quire.runners.
  PythonRunner(quire::RunnerInfo info, int64_t function);
  /// Adds the number to dropped_python_functions(): a destructor may run where Python cannot be called.
  ~PythonRunner() override;

  void run(const std::vector<at::Tensor>& inputs, at::Tensor& y) override;

 private:
  int64_t function_;
};

/// Numbers of functions whose runners are gone, and that no call will ask for again. Each is returned once.
std::vector<int64_t> dropped_python_functions();

}  // namespace quire_torch
