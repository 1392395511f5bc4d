// A thread as operations see it, and the block that it waits in.
#pragma once

#include <bit>
#include <cstring>
#include <memory>
#include <type_traits>

#include "cuda/emulator/program.h"

namespace quire::emulator {

class Block;

enum class Space { generic, global, shared, local, constants };
enum class Touch : uint8_t;

class Thread {
 private:
  struct Frame {
    const Function* function;
    const Instruction* back;
    const Call* call;
    std::size_t registers, area, local;  ///< where they begin
  };

 public:
  /// What a thread holds from its first instruction to its last. Whoever ends first leaves it to the next.
  struct Stacks {
    std::vector<Frame> frames;
    std::vector<uint64_t> registers;
    std::vector<std::byte> area, local;
  };

  /// As thread number `index` of a block.
  void start(Block& block, unsigned index);
  /// At the start of the kernel, with the stacks of a thread that has ended, or new ones.
  void begin(std::unique_ptr<Stacks> stacks);
  bool has_begun() const { return stacks_ != nullptr; }
  std::unique_ptr<Stacks> take_stacks() { return std::move(stacks_); }

  void set(int slot, uint64_t bits) { registers_[slot] = bits; }
  uint64_t bits(int slot) const { return registers_[slot]; }

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

  /// Memory at the address in a register, checked.
  std::byte* address(Space space, const Instruction& i, int slot, std::size_t bytes, Touch touch);
  /// A variable of the function's parameters, or one that it gives to a function that it calls.
  std::byte* area(const Instruction& i, int slot, std::size_t bytes);

  const Instruction* call(const Instruction& i);
  /// From a function to its caller. Null where the kernel ends.
  const Instruction* leave();

  Block& block() { return *block_; }
  const Block& block() const { return *block_; }
  const Function& function() const { return *stacks_->frames.back().function; }
  uint64_t local_base() const { return stacks_->frames.back().local; }
  const std::string& text(const Instruction* i) const;

  unsigned index = 0;               ///< in its block
  Dim3 place;                       ///< %tid
  const Instruction* at = nullptr;  ///< where it goes on, or what it waits in
  bool carry = false;               ///< of add.cc
  bool ended = false;
  struct Copy {
    uint64_t to;
    const std::byte* from;
    std::size_t valid, bytes;
  };
  std::vector<std::vector<Copy>> copies;  ///< asynchronous ones, by group; the last group is open

 private:
  void enter(const Function& function, const Instruction* back, const Call* call);
  std::byte* generic(uint64_t at, std::size_t bytes, Touch touch);
  std::byte* local(uint64_t at, std::size_t bytes);
  std::byte* constants(uint64_t at, std::size_t bytes, Touch touch);

  Block* block_ = nullptr;
  uint64_t* registers_ = nullptr;  ///< of the last frame
  std::unique_ptr<Stacks> stacks_;
};

}  // namespace quire::emulator
