#include "cuda/cuda_device.h"

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "cuda/ptx_files.h"
#include "quire/cuda/device.h"
#include "quire/cuda/self_check.h"

namespace quire::testing {
namespace {

class EmulatedMemory final : public DeviceMemory {
 public:
  std::byte* allocate(size_t bytes) override { return memory.allocate(bytes); }
  bool has(const void* data, size_t bytes) override {
    return memory.translate(static_cast<const std::byte*>(data), bytes, false) != nullptr;
  }
  void clear() override { memory.clear(); }

  emulator::HostMemory memory;
};

/// A function of NVIDIA's driver.
template <class Function>
Function* driver_function(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  void* const found = library ? dlsym(library, name) : nullptr;
  check(found != nullptr, "tests on a GPU need NVIDIA's driver with ", name);
  return reinterpret_cast<Function*>(found);
}

void expect_success(CUresult result, const char* what) {
  check(result == CUDA_SUCCESS, what, " failed: ", int(result));
}

/// Pinned memory of the host that a GPU reads and writes too. Slow, but of tests nobody asks for speed.
class PinnedMemory final : public DeviceMemory {
 public:
  std::byte* allocate(size_t bytes) override {
    std::byte* const at = arena() + used_;
    used_ += (bytes + 2 * kAlign - 1) / kAlign * kAlign;
    check(used_ <= kBytes, "tests need more pinned memory");
    std::fill_n(at, bytes, std::byte{0xA5});
    return at;
  }
  bool has(const void* data, size_t bytes) override {
    const auto* const begin = static_cast<const std::byte*>(data);
    return begin >= arena() && begin + bytes <= arena() + used_;
  }
  void clear() override { used_ = 0; }

 private:
  static constexpr size_t kAlign = 256, kBytes = size_t{1} << 29;

  static std::byte* arena() {
    static std::byte* const memory = [] {
      cuda::nvidia_driver().machine(0);  // which makes the context
      CUcontext primary = nullptr;
      expect_success(driver_function<decltype(cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain")(&primary, 0),
                     "cuDevicePrimaryCtxRetain");
      expect_success(driver_function<decltype(cuCtxSetCurrent)>("cuCtxSetCurrent")(primary), "cuCtxSetCurrent");
      void* at = nullptr;
      expect_success(
          driver_function<decltype(cuMemHostAlloc)>("cuMemHostAlloc")(&at, kBytes, CU_MEMHOSTALLOC_DEVICEMAP),
          "cuMemHostAlloc");
      return static_cast<std::byte*>(at);
    }();
    return memory;
  }

  size_t used_ = 0;
};

}  // namespace

bool on_gpu() {
  const char* const where = std::getenv("QUIRE_CUDA_TESTS");
  return where && std::string_view(where) == "gpu";
}

/// Runs kernels when they are launched.
class CudaDevice::Emulated final : public cuda::Driver {
 public:
  explicit Emulated(EmulatedMemory& memory) : memory_(memory) { renew(); }

  void launch(const cuda::Kernel& kernel, const cuda::Grid& grid, const void* parameters, size_t bytes,
              const Context&) override {
    const auto other = instead.find(std::string(kernel.name));
    const emulator::Program& code =
        other == instead.end() ? program(kernel.module, kernel.name) : program("kernels", other->second);
    const emulator::Launch shape{.grid = {grid.blocks, grid.blocks_y},
                                 .block = {grid.threads},
                                 .shared_bytes = grid.shared_bytes,
                                 .seed = launches};
    steps += emulator::run(code, shape, parameters, bytes, memory_.memory);
    ++launches;
  }
  void fill(void* memory, uint8_t value, int64_t bytes, const Context&) override {
    std::byte* const at = memory_.memory.translate(static_cast<std::byte*>(memory), static_cast<size_t>(bytes), true);
    check(at != nullptr, "fill: ", bytes, " bytes are not memory of the device");
    std::memset(at, value, static_cast<size_t>(bytes));
  }
  cuda::Machine machine(int) override { return seen; }
  const cuda::lt::Functions* cublaslt() override { return library; }
  void read(void* to, const void* from, size_t bytes, const Context&) override {
    const std::byte* const at = memory_.memory.translate(static_cast<const std::byte*>(from), bytes, false);
    check(at != nullptr, "read: ", bytes, " bytes are not memory of the device");
    std::memcpy(to, at, bytes);
    ++reads;
  }
  FaultRecord* faults(int) override { return faults_; }
  bool capturing(int, void*) override { return false; }

  /// To be called when the memory has been cleared.
  void renew() {
    auto* const claim = new (memory_.allocate(sizeof(uint32_t))) uint32_t{0};
    faults_ = new (memory_.allocate(sizeof(FaultRecord))) FaultRecord{.claim = claim};
  }

  using Programs = std::map<std::string, emulator::Program>;

  uint64_t steps = 0, launches = 0, reads = 0;
  cuda::Machine seen{.major = 9, .minor = 0, .multiprocessors = 2};
  const cuda::lt::Functions* library = nullptr;
  std::map<std::string, std::string> instead;
  std::map<std::string, Programs> planted;

 private:
  const emulator::Program& program(std::string_view module, std::string_view kernel) const {
    static std::map<std::string, Programs> modules;
    std::string file(module);
    if (const auto other = planted.find(file); other != planted.end()) return other->second.at(std::string(kernel));
    if (seen.number() >= 89 && has_ptx(file + ".89.ptx")) file += ".89";
    if (!modules.contains(file)) modules[file] = emulator::parse(ptx_of(file + ".ptx"));
    return modules.at(file).at(std::string(kernel));
  }

  EmulatedMemory& memory_;
  FaultRecord* faults_ = nullptr;
};

/// Launches on the first GPU, and counts.
class CudaDevice::Gpu final : public cuda::Driver {
 public:
  void launch(const cuda::Kernel& kernel, const cuda::Grid& grid, const void* parameters, size_t bytes,
              const Context& context) override {
    cuda::nvidia_driver().launch(kernel, grid, parameters, bytes, context);
    ++launches;
  }
  void fill(void* memory, uint8_t value, int64_t bytes, const Context& context) override {
    cuda::nvidia_driver().fill(memory, value, bytes, context);
  }
  cuda::Machine machine(int index) override { return cuda::nvidia_driver().machine(index); }
  const cuda::lt::Functions* cublaslt() override { return cuda::nvidia_driver().cublaslt(); }
  void within(const Context& context, FunctionRef<void()> call) override {
    cuda::nvidia_driver().within(context, call);
  }
  void read(void* to, const void* from, size_t bytes, const Context& context) override {
    cuda::nvidia_driver().read(to, from, bytes, context);
  }
  FaultRecord* faults(int index) override { return cuda::nvidia_driver().faults(index); }
  bool capturing(int index, void* stream) override { return cuda::nvidia_driver().capturing(index, stream); }

  void synchronize() const {
    cuda::nvidia_driver().within(host(), [] {
      expect_success(driver_function<decltype(cuCtxSynchronize)>("cuCtxSynchronize")(), "cuCtxSynchronize");
    });
  }

  uint64_t launches = 0;
};

CudaDevice::CudaDevice() : context_(host()) {
  cuda::set_self_check(false);
  if (on_gpu()) {
    memory_ = std::make_unique<PinnedMemory>();
    gpu_ = std::make_unique<Gpu>();
    before_ = cuda::set_driver(gpu_.get());
  } else {
    auto memory = std::make_unique<EmulatedMemory>();
    emulated_ = std::make_unique<Emulated>(*memory);
    memory_ = std::move(memory);
    before_ = cuda::set_driver(emulated_.get());
  }
  context_.device = &cuda::device(), context_.workspace = this;
  context_.faults = cuda::driver().faults(0);
}

CudaDevice::~CudaDevice() { cuda::set_driver(before_); }

void CudaDevice::clear() {
  if (gpu_) gpu_->synchronize();
  memory_->clear();
  if (emulated_) emulated_->renew();
  context_.faults = cuda::driver().faults(0);
}

void* CudaDevice::zeroed(int64_t bytes) {
  void* const memory = allocate(bytes);
  std::memset(memory, 0, static_cast<size_t>(bytes));
  return memory;
}

void CudaDevice::synchronize() {
  if (gpu_) gpu_->synchronize();
  raise_reported(*context_.faults);
}

void CudaDevice::replace(const std::string& kernel, const std::string& by) {
  check(emulated_ != nullptr, "kernels of tests run on the emulator alone");
  emulated_->instead.clear();
  if (!by.empty()) emulated_->instead[kernel] = by;
}

void CudaDevice::run_code_of(int capability) {
  if (emulated_) pretend({.major = capability / 10, .minor = capability % 10, .multiprocessors = 2}, nullptr);
}

void CudaDevice::pretend(const cuda::Machine& machine, const cuda::lt::Functions* cublaslt) {
  check(emulated_ != nullptr, "a GPU is what it is: other machines are described on the emulator alone");
  emulated_->seen = machine, emulated_->library = cublaslt;
}

void CudaDevice::plant(const std::string& module, const std::string& ptx) {
  check(emulated_ != nullptr, "kernels of tests run on the emulator alone");
  emulated_->planted.clear();
  emulated_->planted[module] = emulator::parse(ptx);
}

uint64_t CudaDevice::reads() const { return emulated_ ? emulated_->reads : 0; }
uint64_t CudaDevice::steps() const { return emulated_ ? emulated_->steps : 0; }
uint64_t CudaDevice::launches() const { return emulated_ ? emulated_->launches : gpu_->launches; }

}  // namespace quire::testing
