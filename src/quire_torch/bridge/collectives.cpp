#include "quire_torch/bridge/collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "quire/base/check.h"

namespace quire_torch {
namespace {

/// Boxed: PyTorch has changed the type of the group's name between versions.
at::Tensor call(const char* name, torch::jit::Stack stack) {
  const auto op = c10::Dispatcher::singleton().findSchema({std::string("_c10d_functional::") + name, ""});
  quire::check(op.has_value(), "this PyTorch was built without torch.distributed, and has no operator ", name,
               "; install a build that has it, or make the layer without a process group");
  op->callBoxed(stack);
  return std::move(stack[0]).toTensor();
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& t, const char* reduction, const Group& group) {
  return call("all_reduce", {t, std::string(reduction), group.name});
}

at::Tensor all_gather(const at::Tensor& t, const Group& group) {
  return call("all_gather_into_tensor", {t.contiguous(), group.size, group.name});
}

at::Tensor reduce_scatter(const at::Tensor& t, const Group& group) {
  return call("reduce_scatter_tensor", {t.contiguous(), std::string("sum"), group.size, group.name});
}

at::Tensor wait(const at::Tensor& t) { return call("wait_tensor", {t}); }

}  // namespace quire_torch
