#include "quire/base/parallel.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <thread>
#include <utility>

#include "quire/base/float_mode.h"
#include "quire/base/lazy.h"
#include "quire/base/thread_pool.h"

namespace quire {
namespace {

/// A program that brings its own executor never starts these. They are not joined at the end of the process: kernels
/// may run in destructors that come later.
void run_on_own_threads(int64_t count, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  if (count <= grain) return body(0, count);
  static constinit Lazy<const Executor> threads;
  threads.get([] { return Executor(thread_executor()); })(count, grain, body);
}

Executor& of_process() {
  static constinit Lazy<Executor> executor;
  return executor.get([] { return Executor(run_on_own_threads); });
}

thread_local const Executor* of_thread = nullptr;

const Executor& in_force() { return of_thread ? *of_thread : of_process(); }

}  // namespace

Executor set_executor(Executor executor) {
  return std::exchange(of_process(), executor ? std::move(executor) : Executor(run_on_own_threads));
}

ExecutorScope::ExecutorScope(const Executor* executor) : before_(of_thread) {
  if (executor) of_thread = executor;
}
ExecutorScope::~ExecutorScope() { of_thread = before_; }

int64_t parallelism() {
  const Executor& executor = in_force();
  if (executor.threads) return std::max<int64_t>(1, executor.threads());
  static constinit Lazy<const int64_t> processors;
  return processors.get([] { return std::max<int64_t>(1, std::thread::hardware_concurrency()); });
}

void parallel_for(int64_t count, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  if (count <= 0) return;
  const Executor* const executor = of_thread;
  if (!executor) [[likely]]
    return of_process()(count, grain, [&](int64_t begin, int64_t end) {
      const FloatMode mode;
      body(begin, end);
    });
  (*executor)(count, grain, [&](int64_t begin, int64_t end) {
    const FloatMode mode;
    const ExecutorScope scope(executor);
    body(begin, end);
  });
}

void parallel_tasks(std::span<const int64_t> costs, FunctionRef<void(size_t)> body) {
  const int64_t threads = parallelism();
  const int64_t large = std::accumulate(costs.begin(), costs.end(), int64_t{0}) / (2 * threads);
  int64_t small = 0;
  for (size_t i = 0; i < costs.size(); ++i) costs[i] > large ? body(i) : void(++small);
  // Costs are estimates, and an executor may cut its range unevenly: whoever is free takes the next. The largest first,
  // so that little is left to wait for at the end; among more than these, one is little.
  std::array<size_t, 64> order;
  const bool sorted = costs.size() <= order.size();
  if (sorted) {
    const auto end = order.begin() + std::ssize(costs);
    std::iota(order.begin(), end, size_t{0});
    std::sort(order.begin(), end, [&](size_t i, size_t j) { return costs[i] > costs[j]; });
  }
  std::atomic<size_t> next{0};
  parallel_for(std::min(threads, small), 1, [&](int64_t, int64_t) {
    for (size_t n = next++; n < costs.size(); n = next++) {
      const size_t i = sorted ? order[n] : n;
      if (costs[i] <= large) body(i);
    }
  });
}

}  // namespace quire
