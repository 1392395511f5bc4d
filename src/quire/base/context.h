// Where a problem runs: what every kernel is given besides the problem itself.
#pragma once

#include <cstdint>
#include <string_view>

namespace quire {

struct Device;    // device/device.h
struct Executor;  // base/parallel.h
class Observer;   // device/observer.h

/// Memory for the time of one call, lent by whoever calls the core: PyTorch's allocator, or the core's own (host()).
class Workspace {
 public:
  virtual ~Workspace() = default;
  /// `bytes` of uninitialised memory of the context's device, aligned to 64 bytes, for everything that the call puts on
  /// the context's stream. Throws if there is none.
  virtual void* allocate(int64_t bytes) = 0;
};

/// One place of execution. Pointers of a problem are memory of this device; only its kernels follow them.
struct Context {
  const Device* device = nullptr;      ///< its kind, which names the kernels; null: host()'s
  int index = 0;                       ///< which of its kind
  void* stream = nullptr;              ///< a queue of the device in its own terms; null on the host
  Workspace* workspace = nullptr;      ///< null: the heap
  const Executor* executor = nullptr;  ///< threads of kernels that run on the host; null: the process's
  Observer* observer = nullptr;        ///< who hears of each problem that has run; null: nobody
  std::string_view part{};             ///< of a larger computation, such as "expert 3", for the observer
};

/// The context of kernels that run in the calling thread before the call returns.
const Context& host();

}  // namespace quire
