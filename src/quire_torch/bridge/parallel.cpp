#include "quire_torch/bridge/parallel.h"

#include <ATen/Parallel.h>
#include <pthread.h>

#include <atomic>

#include "quire/base/parallel.h"

namespace quire_torch {
namespace {

std::atomic<bool> pool_used{false};
std::atomic<bool> pool_lost{false};

/// The threads of a pool do not survive a fork, and OpenMP's would be waited for without end: a child of a process that
/// has used them computes alone.
void after_fork_in_child() { pool_lost = pool_used.load(); }

}  // namespace

void install_executor() {
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
  quire::set_executor([](int64_t count, int64_t grain, quire::FunctionRef<void(int64_t, int64_t)> body) {
    if (pool_lost) return body(0, count);
    pool_used = true;
    at::parallel_for(0, count, grain, body);
  });
}

}  // namespace quire_torch
