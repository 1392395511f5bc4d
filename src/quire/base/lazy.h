// A value of the whole process that its first use makes.
#pragma once

#include <atomic>
#include <memory>

namespace quire {

/// Use it in place of a static variable of a function: a child of fork() would wait forever for one of those that
/// another thread was making. Threads that come first together make one each, and one of them is kept. A value that is
/// kept is never destroyed: threads may compute while the process ends, and libraries end in any order.
template <class T>
class Lazy {
 public:
  /// make() returns a T. What it throws passes through, and the next call makes one again.
  template <class Make>
  T& get(Make&& make) {
    if (T* const kept = value_.load(std::memory_order_acquire)) [[likely]]
      return *kept;
    std::unique_ptr<T> made(new T(make()));
    T* kept = nullptr;
    return value_.compare_exchange_strong(kept, made.get()) ? *made.release() : *kept;
  }
  T& get() {
    return get([] { return T(); });
  }

 private:
  std::atomic<T*> value_{nullptr};
};

}  // namespace quire
