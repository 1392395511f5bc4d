// Memory of PyTorch's allocator that runners keep.
#pragma once

#include "quire/runner/storage.h"
#include "quire_torch/bridge/context.h"

namespace quire_torch {

/// The device with its number: the current one's, where it names none. Throws if PyTorch has no such kind.
at::Device numbered(at::Device device);

/// For what is made of tensors on a device. Memory goes back when the device has done all that it was asked for before
/// the last holder went away: which streams use it is not known.
class TensorStorage final : public quire::Storage {
 public:
  /// Throws for a device that the core has no kernels for.
  explicit TensorStorage(at::Device device) : device_(device), call_(device) {}
  const quire::Context& context() const override { return call_; }
  std::shared_ptr<void> allocate(int64_t bytes) const override;
  void copy(void* to, const void* from, int64_t bytes) const override;
  void upload(void* to, const void* from, int64_t bytes) const override;
  /// Waits until what was allocated has its values, so that every stream may read it, and throws what kernels found.
  void finish() const;

 private:
  at::Device device_;
  CallContext call_;
};

}  // namespace quire_torch
