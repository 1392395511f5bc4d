// CUDA as a device of this process: the rows of a GPU, with launches that the emulator executes. QUIRE_CUDA_TESTS=gpu
// launches on a GPU instead.
#pragma once

#include <memory>
#include <string>

#include "cuda/emulator/emulator.h"
#include "quire/base/context.h"
#include "quire/base/fault.h"
#include "quire/cuda/driver.h"

namespace quire::testing {

/// Whether tests run on a GPU.
bool on_gpu();

/// Memory that kernels and the host have at the same addresses.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  /// `bytes` of it, aligned to 256 and filled with 0xA5.
  virtual std::byte* allocate(size_t bytes) = 0;
  /// Whether all of these bytes are such memory.
  virtual bool has(const void* data, size_t bytes) = 0;
  /// Frees all.
  virtual void clear() = 0;
};

/// The device, while it lives: all rows launch there. One at a time. Rows are used without their self-check.
class CudaDevice final : public Workspace {
 public:
  CudaDevice();
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  operator const Context&() const { return context_; }
  DeviceMemory& memory() { return *memory_; }
  /// Frees all memory.
  void clear();

  void* allocate(int64_t bytes) override { return memory_->allocate(static_cast<size_t>(bytes)); }
  void* zeroed(int64_t bytes) override;

  /// Waits, and throws what a kernel has found.
  void synchronize();
  /// Launches a kernel of kernels.cu in the place of another; empty names: no more. On the emulator alone.
  void replace(const std::string& kernel, const std::string& by);
  /// The emulator runs what modules have for chips of a compute capability such as 80. A GPU is what it is.
  void run_code_of(int capability);
  /// Rows see this machine from here on, with that cuBLASLt. On the emulator alone.
  void pretend(const cuda::Machine& machine, const cuda::lt::Functions* cublaslt);
  /// Takes all kernels of a module from other PTX, until the next module. On the emulator alone.
  void plant(const std::string& module, const std::string& ptx);
  /// Instructions that the emulator has run, launches, and waits for numbers.
  uint64_t steps() const;
  uint64_t launches() const;
  uint64_t reads() const;

 private:
  class Emulated;
  class Gpu;

  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<Emulated> emulated_;
  std::unique_ptr<Gpu> gpu_;
  cuda::Driver* before_;
  Context context_;
};

}  // namespace quire::testing
