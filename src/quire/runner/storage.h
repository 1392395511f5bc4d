// Memory that runners keep, on the device where they compute.
#pragma once

#include <cstdint>
#include <memory>

#include "quire/base/context.h"

namespace quire {

/// What gives memory of one place to those who keep it: the host's is below, the PyTorch layer brings a device's.
class Storage {
 public:
  virtual ~Storage() = default;
  /// Where its memory lies, and kernels that fill it run.
  virtual const Context& context() const = 0;
  /// Uninitialised memory, aligned to 64 bytes, for as long as somebody holds it.
  virtual std::shared_ptr<void> allocate(int64_t bytes) const = 0;
  /// Copies memory of this place, in the order of the context's stream.
  virtual void copy(void* to, const void* from, int64_t bytes) const = 0;
  /// The same of memory of the host, which may change once this has returned.
  virtual void upload(void* to, const void* from, int64_t bytes) const = 0;
};

const Storage& host_storage();

}  // namespace quire
