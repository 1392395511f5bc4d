#include "quire/base/parallel.h"

#include <utility>

#include "quire/base/float_mode.h"

namespace quire {
namespace {

void run_serially(int64_t count, int64_t /*grain*/, const std::function<void(int64_t, int64_t)>& body) {
  body(0, count);
}

Executor& current() {
  static Executor executor = run_serially;
  return executor;
}

}  // namespace

Executor set_executor(Executor executor) {
  return std::exchange(current(), executor ? std::move(executor) : Executor(run_serially));
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  current()(count, grain, [&](int64_t begin, int64_t end) {
    FloatMode mode;
    body(begin, end);
  });
}

}  // namespace quire
