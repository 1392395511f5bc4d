#include "quire_torch/bridge/collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "quire/base/check.h"

namespace quire_torch {
namespace {

/// Boxed: PyTorch has changed the type of the group's name between versions.
torch::jit::IValue call(const char* name, torch::jit::Stack stack) {
  const auto op = c10::Dispatcher::singleton().findSchema({std::string("_c10d_functional::") + name, ""});
  quire::check(op.has_value(), "this PyTorch was built without torch.distributed, and has no operator ", name,
               "; install a build that has it, or make the layer without a process group");
  op->callBoxed(stack);
  return std::move(stack[0]);
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& t, const char* reduction, const Group& group) {
  return call("all_reduce", {t, std::string(reduction), group.name}).toTensor();
}

std::vector<at::Tensor> all_gather(const std::vector<at::Tensor>& tensors, const Group& group) {
  if (tensors.size() == 1)
    return {call("all_gather_into_tensor", {tensors[0].contiguous(), group.size, group.name}).toTensor()};
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& t : tensors) inputs.push_back(t.contiguous());
  return call("all_gather_into_tensor_coalesced", {std::move(inputs), group.size, group.name}).toTensorVector();
}

at::Tensor reduce_scatter(const at::Tensor& t, const Group& group) {
  return call("reduce_scatter_tensor", {t.contiguous(), std::string("sum"), group.size, group.name}).toTensor();
}

at::Tensor wait(const at::Tensor& t) { return call("wait_tensor", {t}).toTensor(); }

}  // namespace quire_torch
