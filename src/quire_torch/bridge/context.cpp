#include "quire_torch/bridge/context.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "quire/base/check.h"
#include "quire/device/device.h"
#include "quire_torch/bridge/observe.h"
#include "quire_torch/op/outputs.h"

namespace quire_torch {
namespace {

const quire::Device* core_device(at::DeviceType type) {
  const std::string name = c10::DeviceTypeName(type, /*lower_case=*/true);
  const quire::Device* const found = quire::find_device(name);
  quire::check(found != nullptr, "quire has no kernels for ", name, "; move the tensors to the CPU with .cpu()");
  return found;
}

}  // namespace

CallContext::CallContext(at::Device device) : device_(device) {
  context_ = quire::host();
  context_.workspace = this;
  context_.observer = observer();
  if (device.is_cpu()) return;
  guard_.reset_device(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  context_.device = core_device(device.type());
  context_.index = device.index();
  context_.stream = guard.getStreamNativeHandle(guard.getStream(device));
}

void* CallContext::allocate(int64_t bytes) {
  lent_.push_back(op::allocate(at::IntArrayRef({bytes}), at::device(device_).dtype(at::kByte)));
  return lent_.back().mutable_data_ptr();
}

}  // namespace quire_torch
