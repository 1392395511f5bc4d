// CUDA as a device of this process: the rows that a GPU would run, with launches that the emulator executes.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "cuda/emulator/machine.h"
#include "cuda/ptx_files.h"
#include "quire/base/fault.h"
#include "quire/cuda/device.h"
#include "quire/cuda/driver.h"

namespace quire::testing {

/// Runs kernels when they are launched. While it lives, it is the driver that all rows use.
class EmulatedDriver final : public cuda::Driver {
 public:
  explicit EmulatedDriver(emulator::Memory& memory) : memory_(memory), before_(cuda::set_driver(this)) { renew(); }
  ~EmulatedDriver() override { cuda::set_driver(before_); }
  EmulatedDriver(const EmulatedDriver&) = delete;
  EmulatedDriver& operator=(const EmulatedDriver&) = delete;

  void launch(const cuda::Kernel& kernel, const cuda::Grid& grid, const void* parameters, size_t bytes,
              const Context&) override {
    // Not more blocks than show that some have a second turn.
    const emulator::Launch launch{.blocks = std::min(grid.blocks, 3u), .threads = grid.threads};
    const auto other = instead.find(std::string(kernel.name));
    const emulator::Program& code =
        other == instead.end() ? program(kernel.module, kernel.name) : program("kernels", other->second);
    steps += emulator::run(code, launch, parameters, bytes, memory_);
    ++launches;
  }
  void fill(void* memory, uint8_t value, int64_t bytes, const Context&) override {
    std::memset(memory, value, static_cast<size_t>(bytes));
  }
  cuda::Capability capability(int) override { return {.major = 9, .minor = 0, .multiprocessors = 2}; }
  FaultRecord* faults(int) override { return faults_; }

  /// To be called when the memory has been cleared.
  void renew() { faults_ = new (memory_.allocate(sizeof(FaultRecord))) FaultRecord{}; }

  uint64_t steps = 0, launches = 0;
  /// Kernels of kernels.cu that are launched in the place of others.
  std::map<std::string, std::string> instead;

 private:
  static const emulator::Program& program(std::string_view module, std::string_view kernel) {
    static std::map<std::string, std::map<std::string, emulator::Program>> modules;
    const std::string name(module);
    if (!modules.contains(name)) modules[name] = emulator::parse(ptx_of(name + ".ptx"));
    return modules.at(name).at(std::string(kernel));
  }

  emulator::Memory& memory_;
  cuda::Driver* before_;
  FaultRecord* faults_ = nullptr;
};

/// A context of it, with memory for the time of a call.
class EmulatedContext final : public Workspace {
 public:
  explicit EmulatedContext(emulator::Memory& memory) : memory_(memory), driver(memory) {
    context_.device = &cuda::device(), context_.workspace = this, context_.faults = driver.faults(0);
  }
  /// Frees all memory.
  void clear() {
    memory_.clear();
    driver.renew();
    context_.faults = driver.faults(0);
  }
  operator const Context&() const { return context_; }
  void* allocate(int64_t bytes) override { return memory_.allocate(static_cast<size_t>(bytes)); }
  void* zeroed(int64_t bytes) override {
    void* const memory = allocate(bytes);
    std::memset(memory, 0, static_cast<size_t>(bytes));
    return memory;
  }
  /// Throws what a kernel has found.
  void synchronize() const { raise_reported(*context_.faults); }

 private:
  emulator::Memory& memory_;

 public:
  EmulatedDriver driver;

 private:
  Context context_ = host();
};

}  // namespace quire::testing
