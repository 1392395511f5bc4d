// Where a problem runs: what every kernel is given besides the problem itself.
#pragma once

#include <cstdint>
#include <string_view>

namespace quire {

struct Device;       // device/device.h
struct Executor;     // base/parallel.h
struct FaultRecord;  // base/fault.h
class Observer;      // device/observer.h

/// Memory for the time of one call, lent by whoever calls the core: PyTorch's allocator, or the core's own (host()).
class Workspace {
 public:
  virtual ~Workspace() = default;
  /// `bytes` of uninitialised memory of the context's device, aligned to 64 bytes, for everything that the call puts on
  /// the context's stream. Throws if there is none.
  virtual void* allocate(int64_t bytes) = 0;
  /// The same of memory that is all zero, such as counters of a product whose K is split. A kernel that is given it
  /// leaves it all zero again when it ends: later calls on the stream get the same memory, and nobody fills it. So it
  /// carries nothing from one kernel to the next. Memory for a captured kernel belongs to the graph, which fills it.
  /// Null: this workspace lends none.
  virtual void* zeroed(int64_t) { return nullptr; }
};

/// One place of execution. Pointers of a problem are memory of this device; only its kernels follow them.
struct Context {
  const Device* device = nullptr;      ///< its kind, which names the kernels; null: host()'s
  int index = 0;                       ///< which of its kind
  void* stream = nullptr;              ///< a queue of the device in its own terms; its default one may be null
  Workspace* workspace = nullptr;      ///< null: the heap
  const Executor* executor = nullptr;  ///< threads of kernels that run on the host; null: the process's
  Observer* observer = nullptr;        ///< who hears of each problem that has run; null: nobody
  /// Where kernels report values that break a rule. Whoever makes a context calls raise_reported() of it, before the
  /// first problem and once it has waited for the device. Null: kernels throw (the host's).
  FaultRecord* faults = nullptr;
  /// The stream is being captured: kernels run later, and more than once. Nobody may wait, and memory comes from
  /// `workspace` alone.
  bool capturing = false;
  /// Only kernels that are declared to give a row of a result the bits that it has alone (kernel_table.h: varies).
  bool batch_invariant = false;
  std::string_view part{};  ///< of a larger computation, such as "expert 3", for the observer
};

/// The context of kernels that run in the calling thread before the call returns.
const Context& host();

}  // namespace quire
