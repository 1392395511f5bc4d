#include "quire_torch/bridge/context.h"

#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "quire/base/fault.h"
#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire/device/place.h"
#include "quire_torch/bridge/observe.h"
#include "quire_torch/op/device.h"
#include "quire_torch/op/outputs.h"

namespace quire_torch {
namespace {

/// The host's, asked for once.
const quire::Context& host_context = quire::host();

const quire::Device* core_device(at::DeviceType type) {
  const std::string name = c10::DeviceTypeName(type, /*lower_case=*/true);
  const quire::Device* const found = quire::find_device(name);
  if (!found)
    quire::fail("quire has no kernels for ", name, " here: ", quire::absence_of(name),
                "; move the tensors to the CPU with .cpu()");
  return found;
}

at::Tensor zeros(int64_t bytes, at::Device device) {
  return at::zeros(at::IntArrayRef({bytes}), at::device(device).dtype(at::kByte));
}

/// Memory that kernels leave as they found it, of each stream.
class Zeros {
 public:
  void* lend(int64_t bytes, at::Device device, const void* stream) {
    const std::lock_guard lock(mutex_);
    std::vector<at::Tensor>& made = of_stream_[{device.type(), device.index(), stream}];
    // Smaller ones stay: another thread may be about to launch a kernel that uses one.
    if (made.empty() || made.back().numel() < bytes)
      made.push_back(zeros(std::max(bytes, made.empty() ? kLeast : 2 * made.back().numel()), device));
    return made.back().mutable_data_ptr();
  }

 private:
  static constexpr int64_t kLeast = 4096;
  quire::ProcessMutex mutex_;
  std::map<std::tuple<at::DeviceType, at::DeviceIndex, const void*>, std::vector<at::Tensor>> of_stream_;
};

}  // namespace

at::Device device_of(const quire::Context& context) {
  if (quire::on_host(context)) return op::kHost;
  return at::Device(quire::place_of(context));
}

void raise_reported(at::Device device) {
  if (op::on_host(device)) return;
  const quire::Device* const kind = core_device(device.type());
  if (!kind->faults) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  quire::raise_reported(*kind->faults(device.has_index() ? device.index() : guard.getDevice().index()));
}

CallContext::CallContext(at::Device device, bool batch_invariant) : device_(device), context_(host_context) {
  context_.batch_invariant = batch_invariant;
  context_.workspace = this;
  context_.observer = observer();
  if (!op::on_host(device)) enter_device();
}

void CallContext::enter_device() {
  guard_.reset_device(device_);
  const c10::impl::VirtualGuardImpl guard(device_.type());
  context_.device = core_device(device_.type());
  context_.index = device_.index();
  const c10::Stream stream = guard.getStream(device_);
  context_.stream = guard.getStreamNativeHandle(stream);
  const auto capturing = context_.device->capturing;
  context_.capturing = capturing && capturing(context_.index, context_.stream);
  if (!context_.device->faults) return;
  context_.faults = context_.device->faults(context_.index);
  quire::raise_reported(*context_.faults);
}

void* CallContext::allocate(int64_t bytes) {
  lent_.push_back(op::allocate(at::IntArrayRef({bytes}), at::device(device_).dtype(at::kByte)));
  return lent_.back().mutable_data_ptr();
}

void* CallContext::zeroed(int64_t bytes) {
  static constinit quire::Lazy<Zeros> kept;
  if (!op::on_host(device_) && !context_.capturing) return kept.get().lend(bytes, device_, context_.stream);
  lent_.push_back(zeros(bytes, device_));
  return lent_.back().mutable_data_ptr();
}

}  // namespace quire_torch
