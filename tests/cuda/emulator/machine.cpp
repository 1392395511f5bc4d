#include "cuda/emulator/machine.h"

#include <algorithm>
#include <string>

namespace quire::emulator {
namespace {

constexpr std::size_t kAlign = 256;
/// A kernel of a test runs a thousand times less.
constexpr uint64_t kMostSteps = 4'000'000'000;

void set_if_used(const Program& program, Thread& thread, const char* name, uint64_t value) {
  if (const auto found = program.slots.find(name); found != program.slots.end()) thread.set(found->second, value);
}

}  // namespace

std::byte* Memory::allocate(std::size_t bytes) {
  auto owned = std::make_unique<std::byte[]>(bytes + 2 * kAlign);
  std::byte* begin = owned.get() + (kAlign - reinterpret_cast<uintptr_t>(owned.get()) % kAlign);
  std::fill_n(begin, bytes, std::byte{0xA5});
  blocks_.push_back({std::move(owned), begin, begin + bytes});
  return begin;
}

void Memory::clear() {
  blocks_.clear();
  last_ = 0;
}

bool Memory::contains(const std::byte* at, std::size_t bytes) const {
  const auto holds = [&](const Block& b) { return at >= b.begin && at < b.end && bytes <= std::size_t(b.end - at); };
  if (last_ < blocks_.size() && holds(blocks_[last_])) return true;
  const auto found = std::find_if(blocks_.begin(), blocks_.end(), holds);
  last_ = static_cast<std::size_t>(found - blocks_.begin());
  return found != blocks_.end();
}

Thread::Thread(const Program& program, const std::byte* parameters, const Memory& memory)
    : program_(program), parameters_(parameters), memory_(memory), local_(program.local_bytes + kAlign) {}

void Thread::start(unsigned block, unsigned thread, const Launch& launch) {
  next = 0;
  registers_ = program_.registers;
  std::fill(local_.begin(), local_.end(), std::byte{0xCD});
  for (const Parameter& p : program_.parameters) set(p.slot, reinterpret_cast<uint64_t>(parameters_ + p.offset));
  const uint64_t local = reinterpret_cast<uint64_t>(local_.data());
  if (program_.local_slot >= 0) set(program_.local_slot, (local + kAlign - 1) / kAlign * kAlign);
  set_if_used(program_, *this, "%tid.x", thread);
  set_if_used(program_, *this, "%ctaid.x", block);
  set_if_used(program_, *this, "%ntid.x", launch.threads);
  set_if_used(program_, *this, "%nctaid.x", launch.blocks);
  set_if_used(program_, *this, "%ctaid.y", 0);
  set_if_used(program_, *this, "%nctaid.y", 1);
}

std::byte* Thread::address(const Instruction& i, int slot, std::size_t bytes) {
  auto* at = reinterpret_cast<std::byte*>(bits(slot) + static_cast<uint64_t>(i.offset));
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0) throw Error("an address that is not aligned");
  const auto within = [&](const std::byte* begin, std::size_t size) {
    return at >= begin && at + bytes <= begin + size;
  };
  if (memory_.contains(at, bytes) || within(local_.data(), local_.size())) return at;
  if (within(parameters_, program_.parameter_bytes) && i.text.find("st.") == std::string::npos) return at;
  throw Error("an address outside of the device's memory");
}

uint64_t run(const Program& program, const Launch& launch, const void* parameters, std::size_t bytes,
             const Memory& memory) {
  if (bytes != program.parameter_bytes)
    throw Error("the kernel takes " + std::to_string(program.parameter_bytes) + " bytes of parameters, and got " +
                std::to_string(bytes));
  std::vector<std::byte> copy(bytes + kAlign);
  std::byte* aligned = copy.data() + (kAlign - reinterpret_cast<uintptr_t>(copy.data()) % kAlign) % kAlign;
  std::memcpy(aligned, parameters, bytes);
  Thread thread(program, aligned, memory);
  uint64_t steps = 0;
  for (unsigned block = 0; block < launch.blocks; ++block)
    for (unsigned n = 0; n < launch.threads; ++n) {
      thread.start(block, n, launch);
      while (thread.next < program.code.size()) {
        const Instruction& i = program.code[thread.next++];
        if (++steps > kMostSteps) throw Error("the kernel does not end, at: " + i.text);
        if (i.guard >= 0 && (thread.bits(i.guard) != 0) != i.guard_value) continue;
        try {
          i.run(thread, i);
        } catch (const Error& e) {
          throw Error(std::string(e.what()) + ", at: " + i.text);
        }
      }
    }
  return steps;
}

}  // namespace quire::emulator
