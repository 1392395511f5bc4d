// quire's CUDA kernels on this device: what a GPU would launch is launched here, and the emulator runs its PTX. So
// PyTorch's side, the host's code and the kernels run together, without a GPU. QUIRE_TEST_DEVICE_ROWS=cuda chooses it.
// QUIRE_TEST_DEVICE_CHIP=100 makes it a chip of compute capability 10.0 with a cuBLASLt, which is a stand-in.
#include "cuda_rows.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "build_folders.h"
#include "cuda/cublaslt_stand_in.h"
#include "cuda/emulator/emulator.h"
#include "quire/base/check.h"
#include "quire/base/fault.h"
#include "quire/cuda/device.h"
#include "quire/cuda/driver.h"
#include "runtime/runtime.h"
#include "runtime/state.h"

namespace testdevice {
namespace {

/// Records of faults, which kernels write and the host reads.
struct Record : quire::FaultRecord {
  Record() { claim = &own_claim; }
};
std::array<Record, kDevices> records;

/// Memory as a kernel sees it: what is lent, by its device address.
class KernelMemory final : public quire::emulator::Memory {
 public:
  explicit KernelMemory(int device) : device_(device) {}
  std::byte* translate(const std::byte* address, size_t bytes, bool) override {
    const auto* const record = reinterpret_cast<const std::byte*>(&records[static_cast<size_t>(device_)]);
    if (address >= record && address + bytes <= record + sizeof(quire::FaultRecord))
      return const_cast<std::byte*>(address);
    if (device_of(address) != device_) return nullptr;
    return reinterpret_cast<std::byte*>(worker_address(address));
  }

 private:
  int device_;
};

/// The device that is current in this thread for libraries.
thread_local int current_index = 0;

/// Products of the stand-in of cuBLASLt, as launches.
class LtOnDevice final : public quire::testing::LtPlace {
 public:
  bool has(const void* data) override { return device_of(data) >= 0; }
  void run(std::span<const quire::testing::LtUse> uses, void* stream,
           std::function<void(const std::vector<const void*>& where)> compute) override {
    Launch launch("cublaslt", place_of(current_index, stream));
    std::vector<const void*> where;
    for (const quire::testing::LtUse& use : uses)
      where.push_back(!use.data ? nullptr : use.written ? launch(const_cast<void*>(use.data)) : launch(use.data));
    std::move(launch).run([where, compute = std::move(compute)] { compute(where); });
  }
};

class Driver final : public quire::cuda::Driver {
 public:
  Driver() {
    const char* const chip = std::getenv("QUIRE_TEST_DEVICE_CHIP");
    const int number = chip ? std::atoi(chip) : 90;
    lt_.machine = {.major = number / 10, .minor = number % 10, .multiprocessors = 2, .cublaslt = chip ? 130100 : 0};
    if (!chip) return;
    lt_.place = &lt_place_;
    cublaslt_ = &quire::testing::lt_stand_in(lt_);
  }

  void launch(const quire::cuda::Kernel& kernel, const quire::cuda::Grid& grid, const void* parameters, size_t bytes,
              const quire::Context& context) override {
    Launch launch(std::string(kernel.name), place_of(context.index, context.stream));
    const std::string copy(static_cast<const char*>(parameters), bytes);
    use_pointers(launch, copy, context.index);
    const quire::emulator::Launch shape{
        .grid = {grid.blocks, grid.blocks_y}, .block = {grid.threads}, .shared_bytes = grid.shared_bytes};
    const quire::emulator::Program& code = program(kernel);
    std::move(launch).run([copy, shape, &code, device = context.index] {
      KernelMemory memory(device);
      quire::emulator::run(code, shape, copy.data(), copy.size(), memory);
    });
  }

  void fill(void* memory, uint8_t value, int64_t bytes, const quire::Context& context) override {
    Launch launch("fill", place_of(context.index, context.stream));
    void* const to = launch(memory);
    std::move(launch).run([=] { std::memset(to, value, static_cast<size_t>(bytes)); });
  }

  /// The only wait that is not counted as one: the self-check of a row waits at the row's first use.
  void read(void* to, const void* from, size_t bytes, const quire::Context& context) override {
    const Place at = place_of(context.index, context.stream);
    refuse_in_capture("the self-check of a kernel");
    count("self-check");
    Launch launch("self-check", at);
    const void* const memory = launch(from);
    const auto copy = std::make_shared<std::string>();
    std::move(launch).run([=] { copy->assign(static_cast<const char*>(memory), bytes); });
    while (!idle(at)) std::this_thread::yield();
    quire::check(copy->size() == bytes, "test device: a kernel of a self-check has failed");
    std::memcpy(to, copy->data(), bytes);
  }

  bool capturing(int index, void* stream) override { return testdevice::capturing(place_of(index, stream)); }
  quire::cuda::Machine machine(int) override { return lt_.machine; }
  const quire::cuda::lt::Functions* cublaslt() override { return cublaslt_; }
  void within(const quire::Context& context, quire::FunctionRef<void()> call) override {
    const int before = std::exchange(current_index, context.index);
    call();
    current_index = before;
  }
  quire::FaultRecord* faults(int index) override { return &records.at(static_cast<size_t>(index)); }

 private:
  /// Words of the parameters that point into memory of the device are its pointers: this launch uses that memory. Bytes
  /// between the members of a struct may look like one, so that what was freed counts for nothing here; the kernel's
  /// own accesses are checked. Whether it reads or writes is not known, and counts as a read.
  static void use_pointers(Launch& launch, const std::string& parameters, int device) {
    for (size_t at = 0; at + sizeof(void*) <= parameters.size(); at += sizeof(void*)) {
      const void* word;
      std::memcpy(&word, parameters.data() + at, sizeof word);
      if (device_of(word) == device && is_lent(word)) launch(word);
    }
  }

  /// Of a file of PTX. QUIRE_PTX_INSTEAD=NAME=PATH: another file.
  static std::string path_of(const std::string& name) {
    const char* const instead = std::getenv("QUIRE_PTX_INSTEAD");
    if (instead && std::string_view(instead).starts_with(name + "=")) return instead + name.size() + 1;
    return std::string(quire::testing::kPtxFolder) + "/" + name;
  }

  const quire::emulator::Program& program(const quire::cuda::Kernel& kernel) {
    const std::lock_guard lock(mutex_);
    const std::string module(kernel.module);
    auto found = modules_.find(module);
    if (found == modules_.end()) {
      const std::string path = path_of(module + ".ptx");
      std::ifstream file(path);
      quire::check(file.good(), "test device: there is no ", path);
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      found = modules_.emplace(module, quire::emulator::parse(text)).first;
    }
    return found->second.at(std::string(kernel.name));
  }

  LtOnDevice lt_place_;
  quire::testing::LtState lt_;
  const quire::cuda::lt::Functions* cublaslt_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, std::map<std::string, quire::emulator::Program>> modules_;
};

}  // namespace

const quire::KernelTables& cuda_rows() {
  static Driver driver;
  quire::cuda::set_driver(&driver);
  return quire::cuda::device().kernels;
}

quire::FaultRecord* cuda_faults(int index) { return &records.at(static_cast<size_t>(index)); }

}  // namespace testdevice
