// Scratch memory that a thread keeps from one kernel to the next.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace quire {

/// `bytes` of the calling thread, uninitialised and 64-byte aligned. The thread keeps the memory and lends it again to
/// the next who asks; who asks while it is lent, or for more, gets new memory, of which the thread keeps the larger.
/// For sizes with a bound that does not depend on the problem: nobody gives it back before the thread ends.
class ThreadMemory {
 public:
  explicit ThreadMemory(int64_t bytes);
  ~ThreadMemory();
  ThreadMemory(const ThreadMemory&) = delete;
  ThreadMemory& operator=(const ThreadMemory&) = delete;

  void* get() const { return block_.memory.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* p) const { ::operator delete(p, kAlignment); }
  };
  struct Block {
    std::unique_ptr<void, Free> memory;
    int64_t bytes = 0;
  };
  static Block& kept();

  Block block_;
};

}  // namespace quire
