// Where an operator computes: the core's Context, made of PyTorch's current device, stream and allocator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>

#include "quire/base/context.h"

namespace quire_torch {

/// Where a context computes, as PyTorch calls it.
at::Device device_of(const quire::Context& context);

/// Throws what a kernel has found on that device, if anything, and nobody has thrown yet. Waits for nothing.
void raise_reported(at::Device device);

/// For the time of one operator's call: makes the device of its tensors current, and lends memory of PyTorch's
/// allocator that goes back, in the order of the stream, when the call has returned.
class CallContext final : public quire::Workspace {
 public:
  /// batch_invariant: as Context::batch_invariant. Throws for a device that the core has no kernels for; and what an
  /// earlier call's kernel has found there.
  explicit CallContext(at::Device device, bool batch_invariant = false);
  CallContext(const CallContext&) = delete;
  CallContext& operator=(const CallContext&) = delete;

  operator const quire::Context&() const { return context_; }
  void* allocate(int64_t bytes) override;
  void* zeroed(int64_t bytes) override;

 private:
  void enter_device();

  c10::OptionalDeviceGuard guard_;
  at::Device device_;
  c10::SmallVector<at::Tensor, 2> lent_;
  quire::Context context_;
};

}  // namespace quire_torch
