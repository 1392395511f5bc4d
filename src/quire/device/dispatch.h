// From a problem to its kernel: check, choose, run. Every function of the core that computes ends here.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "quire/base/env.h"
#include "quire/base/lazy.h"
#include "quire/base/parallel.h"
#include "quire/device/observer.h"
#include "quire/spec/check_problem.h"

namespace quire {

/// The row that `setting` (the text of QUIRE_KERNEL) forces for `op` on the kind `device`; empty if it forces none.
/// Entries are `OPERATION:NAME`, of every device, or `DEVICE:OPERATION:NAME`; several are separated by commas, and the
/// last one counts. Throws Error if the text is not of that form.
std::string_view forced_kernel(std::string_view setting, std::string_view op, std::string_view device);
inline std::string_view name_of_device(const Context& context) {
  return (context.device ? context.device : host().device)->name;
}
/// The same of the environment, which is read once, and of the context's device.
inline std::string_view forced_kernel(std::string_view op, const Context& context) {
  static constinit Lazy<const std::string_view> read;
  const std::string_view setting = read.get(&env::kernel);
  return setting.empty() ? setting : forced_kernel(setting, op, name_of_device(context));
}

/// The kernels that a problem may go to in this context, and the one that is forced.
template <class Problem>
[[gnu::always_inline]] inline Choice<Problem> choice(const Context& context) {
  return {kernels<Problem>(context), forced_kernel(Problem::kOp, context)};
}

/// Runs a problem that has been checked, and tells the observer.
template <class Problem>
void run_checked(const Problem& problem, const Context& context) {
  std::optional<ExecutorScope> scope;
  if (context.executor) [[unlikely]]
    scope.emplace(context.executor);
  choose(Problem::kOp, choice<Problem>(context), problem, context).run(problem, context);
  if (context.observer) [[unlikely]]
    context.observer->ran(&problem, context);
}

/// Throws Error, and has written nothing, unless the problem obeys the rules; then runs the first kernel of the
/// context's device that takes it.
template <class Problem>
void dispatch(const Problem& problem, const Context& context) {
  check_problem(problem);
  run_checked(problem, context);
}

/// The same of a quantization, whose kernels know a side by its data, which an empty tensor may not have.
inline void dispatch(QuantizeProblem problem, const Context& context) {
  check_problem(problem);
  problem.rowwise = problem.rowwise.with_sentinel_data();
  problem.columnwise = problem.columnwise.with_sentinel_data();
  run_checked(problem, context);
}

/// The same of a norm or an activation, whose result may be quantized as it is computed. An observer may need the
/// result that is quantized, also where nobody else does; not where kernels are captured, which run later and more than
/// once.
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

/// One line per kernel, "NAME: VERDICT": "runs", why it cannot take the problem, or which one comes before it.
template <class Problem>
std::string explain_choice(const Problem& problem, const Context& context) {
  return explain_rows(choice<Problem>(context), problem, context);
}

}  // namespace quire
