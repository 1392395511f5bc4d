// Runs problems whose result may be quantized as it is computed: norms and activations.
#pragma once

#include <vector>

#include "quire/device/dispatch.h"

namespace quire {

/// dispatch() of such a problem. An observer may need the result that is quantized, also where nobody else does; not
/// where kernels are captured, which run later and more than once.
template <class Problem>
void produce(Problem problem, const Context& context) {
  check_problem(problem);
  MutableMatrix& y = problem.out.y;
  std::vector<char> memory;
  if (context.observer && !y.data && !context.capturing && context.observer->reads_values()) [[unlikely]] {
    const int64_t bytes = y.rows * y.cols * size_of(y.dtype);
    if (context.workspace)
      y.data = context.workspace->allocate(bytes);
    else if (on_host(context))
      memory.resize(static_cast<size_t>(bytes)), y.data = memory.data();
    y.row_stride = y.cols;
  }
  problem.out.rowwise = problem.out.rowwise.with_sentinel_data();
  problem.out.columnwise = problem.out.columnwise.with_sentinel_data();
  run_checked(problem, context);
}

}  // namespace quire
