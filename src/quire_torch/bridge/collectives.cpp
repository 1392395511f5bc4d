#include "quire_torch/bridge/collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "quire/base/check.h"

namespace quire_torch {
namespace {

thread_local std::string current, next;

/// The first sentence: gloo adds advice that ours replaces.
std::string_view first_sentence(std::string_view error) {
  return error.substr(0, std::min(error.find('\n'), error.find(". This is typically")));
}

/// What a collective says of its failure; empty for other exceptions, which go on as they are: through PyTorch's
/// kernels in Python comes Ctrl-C too. Those are no c10::Error, and begin with the name of their class.
std::string_view failure(const std::exception& error) {
  if (const auto* own = dynamic_cast<const c10::Error*>(&error)) return own->what_without_backtrace();
  const std::string_view text = error.what();
  const bool of_cpp = dynamic_cast<const std::runtime_error*>(&error) != nullptr;
  return of_cpp || text.starts_with("RuntimeError") || text.starts_with("Dist") ? text : std::string_view();
}

[[noreturn]] void fail(const char* collective, const Group& group, std::string_view error) {
  throw c10::DistBackendError(
      {__func__, __FILE__, __LINE__},
      quire::text(current, ": ", collective, " over the ", group.size, " ranks of '", group.name,
                  "' failed: ", first_sentence(error),
                  ". Another rank ended or hangs, or its call has other shapes or another recipe; run all ranks "
                  "with QUIRE_CHECK_RANKS=1 to see which"));
}

/// Boxed: PyTorch has changed the type of the group's name between versions.
torch::jit::IValue call(const char* name, const char* collective, const Group& group, torch::jit::Stack stack) {
  const auto op = c10::Dispatcher::singleton().findSchema({std::string("_c10d_functional::") + name, ""});
  quire::check(op.has_value(), "this PyTorch was built without torch.distributed, and has no operator ", name,
               "; install a build that has it, or make the layer without a process group");
  if (current.empty()) {
    op->callBoxed(stack);
    return std::move(stack[0]);
  }
  try {
    op->callBoxed(stack);
  } catch (const std::exception& error) {
    const std::string_view text = failure(error);
    if (text.empty()) throw;
    fail(collective, group, text);
  }
  return std::move(stack[0]);
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& t, const char* reduction, const Group& group) {
  return call("all_reduce", "all_reduce", group, {t, std::string(reduction), group.name}).toTensor();
}

std::vector<at::Tensor> all_gather(const std::vector<at::Tensor>& tensors, const Group& group) {
  if (tensors.size() == 1)
    return {call("all_gather_into_tensor", "all_gather", group, {tensors[0].contiguous(), group.size, group.name})
                .toTensor()};
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& t : tensors) inputs.push_back(t.contiguous());
  return call("all_gather_into_tensor_coalesced", "all_gather", group, {std::move(inputs), group.size, group.name})
      .toTensorVector();
}

at::Tensor broadcast(const at::Tensor& t, int64_t source, const Group& group) {
  return call("broadcast", "broadcast", group, {t.contiguous(), source, group.name}).toTensor();
}

at::Tensor reduce_scatter(const at::Tensor& t, const Group& group) {
  return call("reduce_scatter_tensor", "reduce_scatter", group,
              {t.contiguous(), std::string("sum"), group.size, group.name})
      .toTensor();
}

at::Tensor all_to_all(const at::Tensor& t, const Group& group) {
  const std::vector<c10::SymInt> splits(static_cast<size_t>(group.size), t.sym_size(0) / group.size);
  return call("all_to_all_single", "all_to_all", group, {t.contiguous(), splits, splits, group.name}).toTensor();
}

at::Tensor wait(const at::Tensor& t, const char* collective, const Group& group) {
  return call("wait_tensor", collective, group, {t}).toTensor();
}

Caller::Caller(std::string layer) : outer_(std::exchange(current, std::move(layer))) {}
Caller::~Caller() { current = std::move(outer_); }

void set_next_caller(std::string_view layer) { next = layer; }
std::string take_next_caller() { return std::exchange(next, {}); }

}  // namespace quire_torch
