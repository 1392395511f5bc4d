#include "quire_torch/bridge/storage.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "quire_torch/bridge/tensor.h"
#include "quire_torch/op/device.h"
#include "quire_torch/op/outputs.h"

namespace quire_torch {

at::Device numbered(at::Device device) {
  if (op::on_host(device) || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

namespace {

void wait_for(at::Device device) {
  if (op::on_host(device)) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeDevice(numbered(device).index());
}

at::Tensor bytes_at(const void* memory, int64_t bytes, at::Device device) {
  return tensor_over(memory, {bytes}, at::kByte, device);
}

}  // namespace

std::shared_ptr<void> TensorStorage::allocate(int64_t bytes) const {
  at::Tensor memory = op::allocate(at::IntArrayRef({bytes}), at::device(device_).dtype(at::kByte));
  void* const data = memory.mutable_data_ptr();
  return {data, [memory = std::move(memory)](void*) mutable {
            try {
              wait_for(memory.device());
            } catch (...) {  // of a device that has failed, as every later call on it says
            }
            memory.reset();
          }};
}

void TensorStorage::copy(void* to, const void* from, int64_t bytes) const {
  if (bytes > 0) bytes_at(to, bytes, device_).copy_(bytes_at(from, bytes, device_));
}

void TensorStorage::upload(void* to, const void* from, int64_t bytes) const {
  if (bytes > 0) bytes_at(to, bytes, device_).copy_(bytes_at(from, bytes, op::kHost));
}

void TensorStorage::finish() const {
  wait_for(device_);
  raise_reported(device_);
}

}  // namespace quire_torch
