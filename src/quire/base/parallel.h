// The threads that host kernels run on. The PyTorch layer installs PyTorch's own thread pool for the process; alone,
// the core starts threads of its own when it first has use for them (thread_pool.h). A Context may bring another
// executor.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>

#include "quire/base/function_ref.h"

namespace quire {

/// Runs body(begin, end) over disjoint chunks that cover [0, count), each at least `grain` long but for the last one.
/// May call body from several threads; returns when all chunks are done and rethrows the first exception.
struct Executor {
  using Run = void(int64_t count, int64_t grain, FunctionRef<void(int64_t, int64_t)> body);

  Executor() = default;
  /// threads: how many chunks run at once; absent: as many as the machine has processors.
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, Executor>)
  Executor(F&& f, std::function<int64_t()> count_threads = {})
      : run(std::forward<F>(f)), threads(std::move(count_threads)) {}

  void operator()(int64_t count, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) const {
    run(count, grain, body);
  }
  explicit operator bool() const { return static_cast<bool>(run); }

  std::function<Run> run;
  std::function<int64_t()> threads;
};

/// Replaces the executor for the whole process and returns the one before. An empty executor restores the core's
/// own threads. Not to be called while kernels run.
Executor set_executor(Executor executor);

/// For its lifetime, `executor` is in force in this thread, and in the chunks that parallel_for runs from here; null
/// changes nothing.
class ExecutorScope {
 public:
  explicit ExecutorScope(const Executor* executor);
  ~ExecutorScope();
  ExecutorScope(const ExecutorScope&) = delete;
  ExecutorScope& operator=(const ExecutorScope&) = delete;

 private:
  const Executor* before_;
};

/// How many chunks the executor in force runs at once, at least 1.
int64_t parallelism();

/// Runs body over [0, count) on the executor in force. Results of the core's kernels never depend on how the range is
/// cut. Every chunk runs with the floating-point mode of numerics.md 0.7 (round to nearest even, subnormals kept),
/// whatever mode the calling thread or a pool's thread is in, and leaves that mode as it found it.
void parallel_for(int64_t count, int64_t grain, FunctionRef<void(int64_t, int64_t)> body);

/// Runs body(i) for each of several tasks of the given costs (in any unit), each of which may use parallel_for itself:
/// those that are a large share of the work one after the other, on all threads; then the others side by side, each on
/// one thread. Rethrows an exception of a task; others may then not have run.
void parallel_tasks(std::span<const int64_t> costs, FunctionRef<void(size_t)> body);

}  // namespace quire
