#include <algorithm>
#include <numeric>

#include "cuda/emulator/block.h"

namespace quire::emulator {
namespace {

constexpr std::size_t kAlign = 256;
/// What a block may have on an H100.
constexpr std::size_t kMostShared = 227 * 1024;

void check(const Program& program, const Launch& launch, std::size_t bytes) {
  const Function& kernel = program.kernel();
  if (bytes != kernel.parameter_bytes)
    throw Error("the kernel takes " + std::to_string(kernel.parameter_bytes) + " bytes of parameters, and got " +
                std::to_string(bytes));
  const Dim3 &b = launch.block, &g = launch.grid;
  const std::size_t threads = std::size_t{b.x} * b.y * b.z;
  if (threads == 0 || threads > kernel.most_threads || b.z > 64)
    throw Error("a block of " + std::to_string(threads) + " threads; " + kernel.name + " takes 1 to " +
                std::to_string(kernel.most_threads) + ", and at most 64 of them along z");
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7FFFFFFFu || g.y > 65535 || g.z > 65535)
    throw Error("a grid that is empty, or has more than 65535 blocks along y or z");
  const std::size_t shared = kernel.shared_bytes + launch.shared_bytes;
  if (shared > kMostShared)
    throw Error(std::to_string(shared) + " bytes of shared memory, more than the " + std::to_string(kMostShared) +
                " of a block");
}

}  // namespace

std::byte* HostMemory::allocate(std::size_t bytes) {
  auto owned = std::make_unique<std::byte[]>(bytes + 2 * kAlign);
  std::byte* begin = owned.get() + (kAlign - reinterpret_cast<uintptr_t>(owned.get()) % kAlign);
  std::fill_n(begin, bytes, std::byte{0xA5});
  blocks_.push_back({std::move(owned), begin, begin + bytes});
  return begin;
}

void HostMemory::clear() {
  blocks_.clear();
  last_ = 0;
}

std::byte* HostMemory::translate(const std::byte* at, std::size_t bytes, bool) {
  const auto holds = [&](const Block& b) { return at >= b.begin && at < b.end && bytes <= std::size_t(b.end - at); };
  if (last_ >= blocks_.size() || !holds(blocks_[last_])) {
    const auto found = std::find_if(blocks_.begin(), blocks_.end(), holds);
    if (found == blocks_.end()) return nullptr;
    last_ = static_cast<std::size_t>(found - blocks_.begin());
  }
  return blocks_[last_].begin + (at - blocks_[last_].begin);
}

const std::vector<Parameter>& Program::parameters() const { return kernel_->parameters; }
std::size_t Program::parameter_bytes() const { return kernel_->parameter_bytes; }
std::size_t Program::shared_bytes() const { return kernel_->shared_bytes; }

uint64_t run(const Program& program, const Launch& launch, const void* parameters, std::size_t bytes, Memory& memory) {
  check(program, launch, bytes);
  Block block(program, launch, static_cast<const std::byte*>(parameters), memory);
  std::vector<uint64_t> order(std::size_t{launch.grid.x} * launch.grid.y * launch.grid.z);
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::mt19937_64 dice(launch.seed);
  if (launch.seed != 0) std::shuffle(order.begin(), order.end(), dice);
  uint64_t steps = 0;
  for (const uint64_t n : order) {
    const Dim3& g = launch.grid;
    const Dim3 index{static_cast<unsigned>(n % g.x), static_cast<unsigned>(n / g.x % g.y),
                     static_cast<unsigned>(n / g.x / g.y)};
    steps += block.run(index, launch.seed == 0 ? 0 : dice() | 1);
  }
  return steps;
}

}  // namespace quire::emulator
