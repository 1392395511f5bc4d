#include "quire/base/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "quire/base/check.h"
#include "quire/base/shape.h"

namespace quire {
namespace {

using Body = FunctionRef<void(int64_t, int64_t)>;

/// A range in chunks, of which whoever is free takes the next. Remembers the first exception.
class Range {
 public:
  Range(int64_t count, int64_t chunk, Body body) : count_(count), chunk_(chunk), body_(body) {}

  void work() {
    for (int64_t begin = next_.fetch_add(chunk_); begin < count_; begin = next_.fetch_add(chunk_)) {
      try {
        body_(begin, std::min(begin + chunk_, count_));
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int64_t count_, chunk_;
  const Body body_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

class ThreadPool {
 public:
  /// Has fewer threads where the system starts no more, such as in a container with a limit.
  explicit ThreadPool(int threads) {
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(static_cast<uint64_t>(i)); });
    } catch (const std::system_error&) {
      return;
    }
  }

  ~ThreadPool() {
    announce(kEnd);
    for (std::thread& worker : workers_) worker.join();
  }

  int64_t threads() const { return static_cast<int64_t>(workers_.size()) + 1; }

  void run(int64_t count, int64_t grain, Body body) {
    const int64_t threads = this->threads();
    const int64_t chunk = std::max({grain, ceil_div(count, threads), int64_t{1}});
    const int64_t helpers = ceil_div(count, chunk) - 1;
    if (helpers <= 0 || getpid() != process_ || busy_.exchange(true)) return body(0, count);
    Range range(count, chunk, body);
    range_ = &range;
    working_.store(static_cast<uint32_t>(helpers), std::memory_order_relaxed);
    announce(static_cast<uint64_t>(helpers));
    range.work();
    // The range is gone when this returns: everyone who was called must have left it.
    for (uint32_t left = working_.load(); left > 0; left = working_.load()) working_.wait(left);
    busy_ = false;
    range.rethrow();
  }

 private:
  /// Instead of a number of helpers.
  static constexpr uint64_t kEnd = 0xffff;

  /// The low bits say how many workers are called, the others change each time.
  void announce(uint64_t helpers) {
    call_.store(((call_.load(std::memory_order_relaxed) >> 16) + 1) << 16 | helpers);
    call_.notify_all();
  }

  void serve(uint64_t self) {
    for (uint64_t seen = 0;;) {
      call_.wait(seen);
      seen = call_.load();
      const uint64_t helpers = seen & 0xffff;
      if (helpers == kEnd) return;
      if (self > helpers) continue;
      range_->work();
      if (working_.fetch_sub(1) == 1) working_.notify_one();
    }
  }

  const pid_t process_ = getpid();
  std::atomic<bool> busy_{false};
  std::atomic<uint64_t> call_{0};
  std::atomic<uint32_t> working_{0};
  Range* range_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace

Executor thread_executor(int threads) {
  check(threads >= 0, "thread_executor: threads must not be negative, got ", threads, "; 0 takes all of the machine's");
  if (threads == 0) threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const auto pool = std::make_shared<ThreadPool>(std::min(threads, 0xfffe));
  return {[pool](int64_t count, int64_t grain, Body body) { pool->run(count, grain, body); },
          [pool] { return pool->threads(); }};
}

}  // namespace quire
