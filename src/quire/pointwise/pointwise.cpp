#include "quire/pointwise/pointwise.h"

#include <vector>

#include "quire/base/parallel.h"
#include "quire/device/dispatch.h"

namespace quire {
namespace {

/// A problem whose result may be quantized. An observer may need that result, also where nobody else does.
template <class Problem>
void run_producer(Problem problem, const Context& context) {
  check_problem(problem);
  MutableMatrix& y = problem.out.y;
  std::vector<char> memory;
  if (context.observer && !y.data && !context.stream && context.observer->reads_values()) [[unlikely]] {
    memory.resize(static_cast<size_t>(y.rows * y.cols * size_of(y.dtype)));
    y = {memory.data(), y.dtype, y.rows, y.cols, y.cols};
  }
  problem.out.rowwise = problem.out.rowwise.marked();
  problem.out.columnwise = problem.out.columnwise.marked();
  run_checked(problem, context);
}

}  // namespace

void norm(const NormProblem& problem, const Context& context) { run_producer(problem, context); }
void norm_grad(const NormGradProblem& problem, const Context& context) { dispatch(problem, context); }

void activation(const ActivationProblem& problem, const Context& context) { run_producer(problem, context); }
void activation_grad(const ActivationGradProblem& problem, const Context& context) { dispatch(problem, context); }

void activation_each(std::span<const ActivationProblem> problems, const Context& context) {
  std::vector<int64_t> costs;
  for (const ActivationProblem& p : problems) {
    check_problem(p);
    costs.push_back(p.x.rows * p.x.cols);
  }
  parallel_tasks(costs, [&](size_t i) { activation(problems[i], context); });
}

std::string explain(const NormProblem& problem, const Context& context) { return explain_choice(problem, context); }
std::string explain(const NormGradProblem& problem, const Context& context) { return explain_choice(problem, context); }
std::string explain(const ActivationProblem& problem, const Context& context) {
  return explain_choice(problem, context);
}
std::string explain(const ActivationGradProblem& problem, const Context& context) {
  return explain_choice(problem, context);
}

}  // namespace quire
