// What the host asks of NVIDIA's driver, and nothing else does: an emulator can stand in for a GPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "quire/base/context.h"
#include "quire/base/function_ref.h"
#include "quire/cuda/cublaslt.h"

namespace quire::cuda {

/// A kernel, by the names of its module (MODULE.cu in kernels/) and of itself. Lives as long as the process.
struct Kernel {
  std::string_view module;
  std::string_view name;
  /// What the driver has found under these names; the same on all devices.
  mutable std::atomic<void*> found{nullptr};
};

/// Threads of a launch.
struct Grid {
  unsigned blocks = 1;
  unsigned blocks_y = 1;
  unsigned threads = 1;       ///< of a block
  unsigned shared_bytes = 0;  ///< of a block, beside what the kernel declares
};

/// What a device is and what libraries are beside it, for rows that not every one can run. Rows ask nothing else before
/// they take a problem, so that one can ask what would run on a machine that is not there.
struct Machine {
  int major = 0, minor = 0;  ///< of its compute capability
  int multiprocessors = 0;
  int cublaslt = 0;             ///< the version of cuBLASLt, such as 130100 for 13.1.0; 0: there is none
  int shared_bytes = 99 << 10;  ///< shared memory that a block can ask for: at least this much from sm_80 on

  constexpr int number() const { return 10 * major + minor; }  ///< as in sm_90
};

class Driver {
 public:
  virtual ~Driver() = default;

  /// Launches on the context's stream. parameters: the one parameter of the kernel, a struct of `bytes`, which is
  /// copied.
  virtual void launch(const Kernel& kernel, const Grid& grid, const void* parameters, size_t bytes,
                      const Context& context) = 0;
  /// Fills memory of the device, in the order of the context's stream.
  virtual void fill(void* memory, uint8_t value, int64_t bytes, const Context& context) = 0;
  /// Copies memory of the device to the host once everything before it on the context's stream has run. Waits for it,
  /// as nothing else here does.
  virtual void read(void* to, const void* from, size_t bytes, const Context& context) = 0;
  /// Whether a stream of a device is being captured.
  virtual bool capturing(int index, void* stream) = 0;
  virtual Machine machine(int index) = 0;
  /// Null if the machine has none.
  virtual const lt::Functions* cublaslt() { return nullptr; }
  /// Calls `call` while the context's device is current in this thread, and what a capture of another thread would
  /// forbid is allowed: for libraries that ask which device is current, and may allocate.
  virtual void within(const Context&, FunctionRef<void()> call) { call(); }
  /// The device's record of faults, in memory of the host that kernels write. One for as long as the process lives.
  virtual FaultRecord* faults(int index) = 0;
};

/// The one in use. Throws Error if there is none.
Driver& driver();
/// Replaces it for the whole process and returns the one before; null: NVIDIA's.
Driver* set_driver(Driver* driver);

/// NVIDIA's driver of this machine (nvidia.cpp). Throws Error, with what is missing, if there is none.
Driver& nvidia_driver();

}  // namespace quire::cuda
