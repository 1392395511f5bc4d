// An emulator of an NVIDIA GPU: runs kernels from the PTX that nvcc makes of them, and finds what a GPU does not tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace quire::emulator {

/// What a device would not have done, or what the emulator does not know: named with the instruction and the thread.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The global memory of a device.
class Memory {
 public:
  virtual ~Memory() = default;
  /// Where the host has the bytes of a kernel's address. Null where a device would fault.
  virtual std::byte* translate(const std::byte* address, std::size_t bytes, bool write) = 0;
};

/// Memory whose addresses are those of the host, so the host reads and writes it too.
class HostMemory final : public Memory {
 public:
  /// `bytes` of it, aligned to 256 and filled with 0xA5. An access one byte beyond it is an error.
  std::byte* allocate(std::size_t bytes);
  void clear();
  std::byte* translate(const std::byte* address, std::size_t bytes, bool write) override;

 private:
  struct Block {
    std::unique_ptr<std::byte[]> owned;
    std::byte* begin;
    std::byte* end;
  };
  std::vector<Block> blocks_;
  std::size_t last_ = 0;  ///< the block of the access before, where the next one is likely to be
};

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct Launch {
  Dim3 grid{};                   ///< in blocks
  Dim3 block{};                  ///< in threads
  std::size_t shared_bytes = 0;  ///< dynamic shared memory of a block
  uint64_t seed = 0;             ///< 0: blocks and threads run in ascending order; else in an order that it gives
  uint64_t most_steps = 4'000'000'000;  ///< instructions of a block: a test needs a thousandth
};

/// Of a kernel: where it lies in the bytes of all parameters, as C++ lays them out too.
struct Parameter {
  std::size_t offset, bytes;
};

struct Function;
struct Module;

/// A kernel of a PTX file.
class Program {
 public:
  Program(std::shared_ptr<const Module> owner, const Function& kernel) : module_(std::move(owner)), kernel_(&kernel) {}

  const Function& kernel() const { return *kernel_; }
  const Module& module() const { return *module_; }
  const std::vector<Parameter>& parameters() const;
  std::size_t parameter_bytes() const;
  /// Static shared memory of a block.
  std::size_t shared_bytes() const;
  /// The instructions that run() refuses when a thread comes to them.
  std::vector<std::string> refused() const;

 private:
  std::shared_ptr<const Module> module_;
  const Function* kernel_;
};

/// The kernels of a PTX file by name. Throws Error for text that is not PTX.
std::map<std::string, Program> parse(std::string_view ptx);

/// Runs a kernel to its end. parameters: the kernel's parameters as a struct. Throws Error where a device would fault,
/// where its result would depend on the order of threads, and for an operation that is unknown or not exact. Returns
/// how many instructions ran.
uint64_t run(const Program& program, const Launch& launch, const void* parameters, std::size_t bytes, Memory& memory);

}  // namespace quire::emulator
