#include <algorithm>

#include "cuda/emulator/block.h"

namespace quire::emulator {
namespace {

constexpr std::byte kPoison{0xCD};
constexpr std::size_t kAlign = 256;
constexpr std::size_t kDeepest = 256;  ///< calls within calls

std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

void Thread::start(Block& block, unsigned number) {
  block_ = &block;
  index = number;
  const Dim3& size = block.launch.block;
  place = {number % size.x, number / size.x % size.y, number / size.x / size.y};
  carry = ended = false;
  copies.assign(1, {});
  at = nullptr;
}

void Thread::begin(std::unique_ptr<Stacks> stacks) {
  stacks_ = stacks ? std::move(stacks) : std::make_unique<Stacks>();
  stacks_->frames.clear();
  const Function& kernel = block_->program.kernel();
  enter(kernel, nullptr, nullptr);
  if (kernel.parameter_bytes) std::memcpy(stacks_->area.data(), block_->parameters, kernel.parameter_bytes);
  at = kernel.code.data();
}

void Thread::enter(const Function& f, const Instruction* back, const Call* call) {
  Frame frame{&f, back, call, 0, 0, 0};
  if (!stacks_->frames.empty()) {
    const Frame& last = stacks_->frames.back();
    frame.registers = last.registers + last.function->registers.size();
    frame.area = last.area + aligned(last.function->area_bytes);
    frame.local = last.local + aligned(last.function->local_bytes);
  }
  if (stacks_->frames.size() > kDeepest) throw Error("more than " + std::to_string(kDeepest) + " calls within calls");
  stacks_->frames.push_back(frame);
  const auto grow = [](auto& stack, std::size_t size) {
    if (stack.size() < size) stack.resize(size);
  };
  grow(stacks_->registers, frame.registers + f.registers.size());
  grow(stacks_->area, frame.area + f.area_bytes);
  grow(stacks_->local, frame.local + f.local_bytes);
  registers_ = stacks_->registers.data() + frame.registers;
  std::copy(f.registers.begin(), f.registers.end(), registers_);
  std::fill_n(stacks_->area.begin() + static_cast<std::ptrdiff_t>(frame.area), f.area_bytes, kPoison);
  std::fill_n(stacks_->local.begin() + static_cast<std::ptrdiff_t>(frame.local), f.local_bytes, kPoison);
  for (const Special& s : f.specials) set(s.slot, s.value(*this));
}

const Instruction* Thread::call(const Instruction& i) {
  const Call& call = function().calls[static_cast<std::size_t>(i.target)];
  if (!call.callee) throw Error("a call of a function that this module does not have");
  const std::size_t caller = stacks_->frames.back().area;
  enter(*call.callee, &i + 1, &call);
  std::byte* const areas = stacks_->area.data();
  for (const Call::Copy& c : call.arguments)
    std::memcpy(areas + stacks_->frames.back().area + c.to, areas + caller + c.from, c.bytes);
  return call.callee->code.data();
}

const Instruction* Thread::leave() {
  const Frame callee = stacks_->frames.back();
  if (stacks_->frames.size() == 1) {
    block_->end(*this);
    return nullptr;
  }
  stacks_->frames.pop_back();
  const Frame& caller = stacks_->frames.back();
  for (const Call::Copy& c : callee.call->results)
    std::memcpy(stacks_->area.data() + caller.area + c.to, stacks_->area.data() + callee.area + c.from, c.bytes);
  registers_ = stacks_->registers.data() + caller.registers;
  return callee.back;
}

const std::string& Thread::text(const Instruction* i) const {
  static const std::string none = "the end";
  const Function& f = function();
  const auto n = static_cast<std::size_t>(i - f.code.data());
  return i >= f.code.data() && n < f.texts.size() ? f.texts[n] : none;
}

std::byte* Thread::area(const Instruction& i, int slot, std::size_t bytes) {
  const std::size_t begin = bits(slot) + static_cast<uint64_t>(i.offset);
  if ((begin & (bytes - 1)) != 0) throw Error("an address that is not aligned");
  if (begin > function().area_bytes || bytes > function().area_bytes - begin)
    throw Error("an address outside of the parameters");
  return stacks_->area.data() + stacks_->frames.back().area + begin;
}

std::byte* Thread::local(uint64_t begin, std::size_t bytes) {
  const std::size_t size = stacks_->frames.back().local + function().local_bytes;
  if (begin >= size || bytes > size - begin) throw Error("an address outside of local memory");
  return stacks_->local.data() + begin;
}

std::byte* Thread::constants(uint64_t begin, std::size_t bytes, Touch touch) {
  const std::vector<std::byte>& all = block_->program.module().constants;
  if (touch != Touch::read) throw Error("a change of a variable of the module, which the emulator keeps constant");
  if (begin >= all.size() || bytes > all.size() - begin) throw Error("an address outside of the module's variables");
  return const_cast<std::byte*>(all.data()) + begin;
}

std::byte* Thread::generic(uint64_t from, std::size_t bytes, Touch touch) {
  const uint64_t begin = from & ~kSpaceMask;
  switch (from & kSpaceMask) {
    case kShared:
      return block_->shared.access(begin, bytes, touch, index);
    case kLocal:
      return local(begin, bytes);
    case kConstants:
      return constants(begin, bytes, touch);
    case kParam: {
      const std::size_t size = block_->program.kernel().parameter_bytes;
      if (touch != Touch::read || begin > size || bytes > size - begin)
        throw Error("an address outside of the parameters");
      return stacks_->area.data() + begin;
    }
    default:
      break;
  }
  std::byte* host = block_->memory.translate(reinterpret_cast<const std::byte*>(from), bytes, touch != Touch::read);
  if (!host) throw Error("an address outside of the device's memory");
  return host;
}

std::byte* Thread::address(Space space, const Instruction& i, int slot, std::size_t bytes, Touch touch) {
  const uint64_t begin = bits(slot) + static_cast<uint64_t>(i.offset);
  if ((begin & (bytes - 1)) != 0) throw Error("an address that is not aligned");
  switch (space) {
    case Space::shared:
      return block_->shared.access(begin, bytes, touch, index);
    case Space::local:
      return local(begin, bytes);
    case Space::constants:
      return constants(begin & ~kSpaceMask, bytes, touch);
    case Space::global: {
      const uint64_t window = begin & kSpaceMask;
      if (window != 0 && window != kConstants) throw Error("an address that is not in global memory");
      return generic(begin, bytes, touch);
    }
    case Space::generic:
      return generic(begin, bytes, touch);
  }
  throw Error("an unknown space");
}

}  // namespace quire::emulator
