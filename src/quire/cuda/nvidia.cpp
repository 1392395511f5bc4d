// NVIDIA's driver: libcuda.so.1, opened when it is first needed. Its interface does not change, so that one binary runs
// beside every PyTorch and every driver from CUDA 12 on.
#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "quire/base/fault.h"
#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire/cuda/driver.h"
#include "quire/cuda/modules.h"

namespace quire::cuda {
namespace {

/// The functions of libcuda that are called here, by their names there.
struct Library {
  decltype(&cuGetErrorString) get_error_string = nullptr;
  decltype(&cuInit) init = nullptr;
  decltype(&cuDeviceGet) device_get = nullptr;
  decltype(&cuDeviceGetAttribute) device_attribute = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain_primary = nullptr;
  decltype(&cuCtxGetCurrent) get_current = nullptr;
  decltype(&cuCtxSetCurrent) set_current = nullptr;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode = nullptr;
  decltype(&cuStreamIsCapturing) is_capturing = nullptr;
  decltype(&cuMemHostAlloc) host_alloc = nullptr;
  decltype(&cuMemAlloc) allocate = nullptr;
  decltype(&cuMemsetD8Async) memset_async = nullptr;
  decltype(&cuMemcpyDtoHAsync) copy_to_host = nullptr;
  decltype(&cuStreamCreate) create_stream = nullptr;
  decltype(&cuStreamDestroy) destroy_stream = nullptr;
  decltype(&cuStreamSynchronize) wait_for_stream = nullptr;
  decltype(&cuLibraryLoadData) library_load = nullptr;
  decltype(&cuLibraryGetKernel) library_kernel = nullptr;
  decltype(&cuKernelSetAttribute) kernel_attribute = nullptr;
  decltype(&cuLaunchKernel) launch = nullptr;

  Library() {
    void* const handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    check(handle != nullptr, "cuda: NVIDIA's driver (libcuda.so.1) is not on this machine; install it, or move the ",
          "tensors to the CPU with .cpu()");
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      check(function != nullptr, "cuda: NVIDIA's driver has no ", name, "; install one for CUDA 12.4 or newer");
    };
    find(get_error_string, "cuGetErrorString"), find(init, "cuInit"), find(device_get, "cuDeviceGet");
    find(device_attribute, "cuDeviceGetAttribute"), find(retain_primary, "cuDevicePrimaryCtxRetain");
    find(get_current, "cuCtxGetCurrent"), find(set_current, "cuCtxSetCurrent");
    find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode"), find(host_alloc, "cuMemHostAlloc");
    find(allocate, "cuMemAlloc_v2");
    find(create_stream, "cuStreamCreate"), find(destroy_stream, "cuStreamDestroy_v2");
    find(is_capturing, "cuStreamIsCapturing"), find(memset_async, "cuMemsetD8Async");
    find(copy_to_host, "cuMemcpyDtoHAsync_v2"), find(wait_for_stream, "cuStreamSynchronize");
    find(library_load, "cuLibraryLoadData");
    find(library_kernel, "cuLibraryGetKernel"), find(kernel_attribute, "cuKernelSetAttribute");
    find(launch, "cuLaunchKernel");
  }
};

class Nvidia final : public Driver {
 public:
  Nvidia() { expect(cuda_.init(0), "cuInit"); }

  void launch(const Kernel& kernel, const Grid& grid, const void* parameters, size_t, const Context& context) override {
    const Current current(*this, context.index);
    const CUkernel found = kernel_of(kernel);
    ask_for_shared(found, grid, context.index);
    void* arguments[] = {const_cast<void*>(parameters)};
    const CUresult result =
        cuda_.launch(reinterpret_cast<CUfunction>(found), grid.blocks, grid.blocks_y, 1, grid.threads, 1, 1,
                     grid.shared_bytes, static_cast<CUstream>(context.stream), arguments, nullptr);
    if (result != CUDA_SUCCESS) [[unlikely]]
      expect(result, text("launch of ", kernel.name));
  }

  void fill(void* memory, uint8_t value, int64_t bytes, const Context& context) override {
    const Current current(*this, context.index);
    expect(cuda_.memset_async(reinterpret_cast<CUdeviceptr>(memory), value, static_cast<size_t>(bytes),
                              static_cast<CUstream>(context.stream)),
           "cuMemsetD8Async");
  }

  void read(void* to, const void* from, size_t bytes, const Context& context) override {
    const Current current(*this, context.index);
    const Uncaptured uncaptured(cuda_);
    const auto stream = static_cast<CUstream>(context.stream);
    expect(cuda_.copy_to_host(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream), "cuMemcpyDtoHAsync");
    expect(cuda_.wait_for_stream(stream), "cuStreamSynchronize");
  }

  bool capturing(int index, void* stream) override {
    const Current current(*this, index);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    expect(cuda_.is_capturing(static_cast<CUstream>(stream), &status), "cuStreamIsCapturing");
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
  }

  Machine machine(int index) override { return of(index).machine; }
  const lt::Functions* cublaslt() override { return lt::find(); }

  void within(const Context& context, FunctionRef<void()> call) override {
    const Current current(*this, context.index);
    const Uncaptured uncaptured(cuda_);
    call();
  }

  FaultRecord* faults(int index) override { return of(index).faults; }

 private:
  /// What is known of a device; made at its first use.
  struct Known {
    CUcontext primary = nullptr;
    Machine machine;
    FaultRecord* faults = nullptr;
  };

  /// A device whose primary context, which is PyTorch's, is current for this long. A thread that had none keeps it, as
  /// it does after calls of CUDA's runtime: threads of PyTorch's autograd have none, and to change it twice for each
  /// launch takes longer than the launch.
  class Current {
   public:
    Current(Nvidia& driver, int index) : Current(driver.cuda_, driver.of(index).primary) {}
    Current(const Library& cuda, CUcontext wanted) : cuda_(cuda) {
      cuda_.get_current(&before_);
      if (before_ == wanted) return;
      expect(cuda_, cuda_.set_current(wanted), "cuCtxSetCurrent");
      changed_ = true;
    }
    ~Current() {
      if (changed_ && before_) cuda_.set_current(before_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Library& cuda_;
    CUcontext before_ = nullptr;
    bool changed_ = false;
  };

  /// Allows, for this long, what a capture of another thread would forbid and does not hear of.
  class Uncaptured {
   public:
    explicit Uncaptured(const Library& cuda) : cuda_(cuda) { cuda_.exchange_capture_mode(&mode_); }
    ~Uncaptured() { cuda_.exchange_capture_mode(&mode_); }
    Uncaptured(const Uncaptured&) = delete;
    Uncaptured& operator=(const Uncaptured&) = delete;

   private:
    const Library& cuda_;
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  };

  static constexpr size_t kDevices = 64;

  static void expect(const Library& cuda, CUresult result, std::string_view what) {
    if (result == CUDA_SUCCESS) return;
    const char* words = nullptr;
    cuda.get_error_string(result, &words);
    fail("cuda: ", what, " failed: ", words ? words : "unknown error", " (", static_cast<int>(result), ")");
  }
  void expect(CUresult result, std::string_view what) const { expect(cuda_, result, what); }

  int attribute(CUdevice_attribute which, CUdevice device) const {
    int value = 0;
    expect(cuda_.device_attribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
  }

  const Known& of(int index) {
    check(index >= 0 && static_cast<size_t>(index) < kDevices, "cuda: there is no device ", index);
    std::atomic<const Known*>& slot = known_[static_cast<size_t>(index)];
    if (const Known* found = slot.load(std::memory_order_acquire)) return *found;
    const lt::Functions* const library = lt::find();
    const std::lock_guard lock(mutex_);
    if (!slot.load(std::memory_order_relaxed)) {
      auto known = std::make_unique<Known>(learn(index));
      if (library) known->machine.cublaslt = static_cast<int>(library->GetVersion());
      slot.store(known.release(), std::memory_order_release);
    }
    return *slot.load(std::memory_order_relaxed);
  }

  Known learn(int index) {
    const Uncaptured uncaptured(cuda_);
    CUdevice device = 0;
    expect(cuda_.device_get(&device, index), text("device ", index));
    Known known;
    expect(cuda_.retain_primary(&known.primary, device), "cuDevicePrimaryCtxRetain");
    known.machine = {.major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
                     .minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
                     .multiprocessors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device),
                     .shared_bytes = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)};
    const Current current(cuda_, known.primary);
    known.faults = make_record();
    return known;
  }

  /// Of the current context. It stays until the process ends.
  FaultRecord* make_record() const {
    void* memory = nullptr;
    expect(cuda_.host_alloc(&memory, sizeof(FaultRecord), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
           "cuMemHostAlloc");
    CUdeviceptr claim = 0;
    expect(cuda_.allocate(&claim, sizeof(uint32_t)), "cuMemAlloc");
    CUstream stream = nullptr;  // the default one may not be used while another one is captured
    expect(cuda_.create_stream(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    expect(cuda_.memset_async(claim, 0, sizeof(uint32_t), stream), "cuMemsetD8Async");
    expect(cuda_.wait_for_stream(stream), "cuStreamSynchronize");
    expect(cuda_.destroy_stream(stream), "cuStreamDestroy");
    return new (memory) FaultRecord{.claim = reinterpret_cast<uint32_t*>(claim)};
  }

  /// More shared memory than every device has for a block is asked for, on each device. A limit is only raised: other
  /// threads launch the same kernel with other sizes.
  void ask_for_shared(CUkernel kernel, const Grid& grid, int index) {
    constexpr unsigned without_asking = 48 << 10;
    if (grid.shared_bytes <= without_asking) return;
    const std::lock_guard lock(mutex_);
    unsigned& limit = shared_limits_[{kernel, index}];
    if (grid.shared_bytes <= limit) return;
    CUdevice device = 0;
    expect(cuda_.device_get(&device, index), "cuDeviceGet");
    expect(cuda_.kernel_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(grid.shared_bytes),
                                  kernel, device),
           "cuKernelSetAttribute");
    limit = grid.shared_bytes;
  }

  CUkernel kernel_of(const Kernel& kernel) {
    if (void* const found = kernel.found.load(std::memory_order_acquire)) return static_cast<CUkernel>(found);
    const std::lock_guard lock(mutex_);
    const Uncaptured uncaptured(cuda_);
    CUlibrary& library = libraries_[std::string(kernel.module)];
    if (!library)
      expect(cuda_.library_load(&library, module_code(kernel.module), nullptr, nullptr, 0, nullptr, nullptr, 0),
             text("loading of ", kernel.module));
    CUkernel found = nullptr;
    expect(cuda_.library_kernel(&found, library, std::string(kernel.name).c_str()), kernel.name);
    kernel.found.store(found, std::memory_order_release);
    return found;
  }

  Library cuda_;
  ProcessMutex mutex_;
  std::array<std::atomic<const Known*>, kDevices> known_{};
  std::map<std::string, CUlibrary> libraries_;
  std::map<std::pair<CUkernel, int>, unsigned> shared_limits_;  ///< of each kernel on each device
};

}  // namespace

Driver& nvidia_driver() {
  static constinit Lazy<Nvidia> driver;
  return driver.get();
}

}  // namespace quire::cuda
