#include "quire/base/thread_memory.h"

#include <utility>

namespace quire {

ThreadMemory::Block& ThreadMemory::kept() {
  thread_local Block block;
  return block;
}

ThreadMemory::ThreadMemory(int64_t bytes) : block_(std::exchange(kept(), {})) {
  if (block_.bytes >= bytes) return;
  block_ = {};
  block_.memory.reset(::operator new(static_cast<size_t>(bytes), kAlignment));
  block_.bytes = bytes;
}

ThreadMemory::~ThreadMemory() {
  if (kept().bytes < block_.bytes) std::swap(kept(), block_);
}

}  // namespace quire
