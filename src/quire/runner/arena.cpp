#include "quire/runner/arena.h"

#include <algorithm>
#include <mutex>

#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire/spec/groups.h"

namespace quire {
namespace {

struct Pool {
  ProcessMutex mutex;
  std::vector<std::unique_ptr<Arena>> idle;
};

Pool& pool() {
  static constinit Lazy<Pool> one;
  return one.get();
}

}  // namespace

std::array<int64_t, 3> rowwise_bytes(const QuantSpec& spec, int64_t rows, int64_t cols) {
  const Buffers<int64_t> b = buffers<int64_t>(spec, {rows, cols}, Direction::rowwise);
  const auto bytes = [](const Buffer<int64_t>& buffer) {
    return product(buffer.sizes, 0, buffer.sizes.size()) * size_of(buffer.dtype);
  };
  return {bytes(b.data), bytes(b.scale), bytes(b.amax)};
}

void* Arena::take_bytes(int64_t count) {
  const int64_t size = round_up(std::max<int64_t>(count, 1), kAlign);
  if (blocks_.empty() || size > blocks_.back().size - used_) {
    constexpr int64_t kSmallest = int64_t{1} << 12;
    add_block(std::max({size, kSmallest, blocks_.empty() ? merged_ : 2 * blocks_.back().size}));
  }
  used_ += size;
  return blocks_.back().memory.get() + used_ - size;
}

Side Arena::take_rowwise(const QuantSpec& spec, int64_t rows, int64_t cols) {
  const auto [data, scale, amax] = rowwise_bytes(spec, rows, cols);
  const int64_t scale_at = round_up(data, kAlign), amax_at = plus(scale_at, round_up(scale, kAlign));
  auto* memory = static_cast<std::byte*>(take_bytes(plus(amax_at, amax)));
  return {memory, memory + scale_at, reinterpret_cast<float*>(memory + amax_at)};
}

std::span<Side> Arena::take_rowwise(const QuantSpec& spec, std::span<const int32_t> ends, int64_t rows, int64_t cols) {
  const bool floats = spec.row().scale == ScaleKind::f32;
  const auto most = grouped_counts<int64_t>(spec, {rows, cols, std::ssize(ends)}, Direction::rowwise);
  Side next{take<std::byte>(most[0]), take_bytes(most[1] * (floats ? 4 : 1)), take<float>(most[2])};
  const std::span sides(take<Side>(std::ssize(ends)), ends.size());
  int32_t begin = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    sides[i] = next;
    const auto used = counts(buffers<int64_t>(spec, {ends[i] - begin, cols}, Direction::rowwise));
    next = {static_cast<std::byte*>(next.data) + used[0],
            static_cast<std::byte*>(next.scale) + used[1] * (floats ? 4 : 1), next.amax + used[2]};
    begin = ends[i];
  }
  return sides;
}

void Arena::reset() {
  used_ = 0;
  if (blocks_.size() <= 1) return;
  merged_ = capacity();
  blocks_.clear();
}

int64_t Arena::capacity() const {
  int64_t size = 0;
  for (const Block& block : blocks_) size += block.size;
  return size;
}

void Arena::add_block(int64_t size) {
  auto* memory = static_cast<std::byte*>(::operator new(static_cast<size_t>(size), std::align_val_t{kAlign}));
  blocks_.push_back({std::unique_ptr<std::byte, Free>(memory), size});
  used_ = 0;
}

HeldArena::HeldArena() {
  Pool& p = pool();
  const std::lock_guard lock(p.mutex);
  if (p.idle.empty()) {
    arena_ = std::make_unique<Arena>();
  } else {
    arena_ = std::move(p.idle.back());
    p.idle.pop_back();
  }
}

HeldArena::~HeldArena() {
  arena_->reset();
  Pool& p = pool();
  const std::lock_guard lock(p.mutex);
  p.idle.push_back(std::move(arena_));
}

int64_t idle_arena_bytes() {
  Pool& p = pool();
  const std::lock_guard lock(p.mutex);
  int64_t bytes = 0;
  for (const auto& arena : p.idle) bytes += arena->capacity();
  return bytes;
}

void release_idle_arenas() {
  Pool& p = pool();
  const std::lock_guard lock(p.mutex);
  p.idle.clear();
}

}  // namespace quire
