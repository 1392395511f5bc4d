// A device of one thread at a time: memory of its own, and kernels that run on it.
#pragma once

#include <bit>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "cuda/emulator/program.h"

namespace quire::emulator {

/// What kernels may read and write. Its addresses are those of the host, so the host reads and writes it too.
class Memory {
 public:
  /// `bytes` of it, aligned to 256 and filled with 0xA5. An access one byte beyond it is an error.
  std::byte* allocate(std::size_t bytes);
  void clear();
  bool contains(const std::byte* at, std::size_t bytes) const;

 private:
  struct Block {
    std::unique_ptr<std::byte[]> owned;
    std::byte* begin;
    std::byte* end;
  };
  std::vector<Block> blocks_;
  mutable std::size_t last_ = 0;  ///< the block of the access before, where the next one is likely to be
};

struct Launch {
  unsigned blocks = 1;
  unsigned threads = 32;  ///< of each block
};

/// Runs a kernel to its end, thread after thread. parameters: the kernel's parameters as a struct. Throws Error where a
/// device would fault. Returns how many instructions ran.
uint64_t run(const Program& program, const Launch& launch, const void* parameters, std::size_t bytes,
             const Memory& memory);

/// One thread, as operations see it.
class Thread {
 public:
  Thread(const Program& program, const std::byte* parameters, const Memory& memory);

  void start(unsigned block, unsigned thread, const Launch& launch);
  void set(int slot, uint64_t bits) { registers_[static_cast<std::size_t>(slot)] = bits; }
  uint64_t bits(int slot) const { return registers_[static_cast<std::size_t>(slot)]; }

  /// A register as a number of T; integers take its low bits.
  template <class T>
  T read(int slot) const {
    if constexpr (std::is_same_v<T, float>)
      return std::bit_cast<float>(static_cast<uint32_t>(bits(slot)));
    else if constexpr (std::is_same_v<T, double>)
      return std::bit_cast<double>(bits(slot));
    else
      return static_cast<T>(bits(slot));
  }
  /// A result that is NaN is 0x7FFFFFFF, as PTX says.
  template <class T>
  void write(int slot, T value) {
    if constexpr (std::is_same_v<T, float>)
      set(slot, value != value ? 0x7FFFFFFFu : std::bit_cast<uint32_t>(value));
    else if constexpr (std::is_same_v<T, double>)
      set(slot, std::bit_cast<uint64_t>(value));
    else
      set(slot, static_cast<uint64_t>(value));
  }

  /// Memory at the address in a register: the device's, this thread's or the parameters. Checked.
  std::byte* address(const Instruction& i, int slot, std::size_t bytes);

  std::size_t next = 0;  ///< the instruction to run

 private:
  const Program& program_;
  const std::byte* parameters_;
  const Memory& memory_;
  std::vector<uint64_t> registers_;
  std::vector<std::byte> local_;
};

}  // namespace quire::emulator
