#include "quire/pointwise/pointwise.h"

#include <vector>

#include "quire/base/env.h"
#include "quire/base/parallel.h"
#include "quire/pointwise/kernels.h"
#include "quire/spec/check_problem.h"

namespace quire {
namespace {

constexpr std::string_view kNorm = "norm", kActivation = "activation";

template <class Problem>
void run(std::string_view op, const Problem& problem) {
  choose(op, pointwise_kernels<Problem>(), forced_kernel(env::kernel(), op), problem).run(problem);
}

/// The same for a problem whose result may be quantized.
template <class Problem>
void run_producer(std::string_view op, Problem problem) {
  check_problem(problem);
  problem.out.rowwise = problem.out.rowwise.marked();
  problem.out.columnwise = problem.out.columnwise.marked();
  run(op, problem);
}

template <class Problem>
std::string explain_as(std::string_view op, const Problem& problem) {
  return explain_rows(pointwise_kernels<Problem>(), forced_kernel(env::kernel(), op), problem);
}

}  // namespace

void norm(const NormProblem& problem) { run_producer(kNorm, problem); }

void norm_grad(const NormGradProblem& problem) {
  check_problem(problem);
  run(kNorm, problem);
}

void activation(const ActivationProblem& problem) { run_producer(kActivation, problem); }

void activation_each(std::span<const ActivationProblem> problems) {
  std::vector<int64_t> costs;
  for (const ActivationProblem& p : problems) {
    check_problem(p);
    costs.push_back(p.x.rows * p.x.cols);
  }
  parallel_tasks(costs, [&](size_t i) { activation(problems[i]); });
}

void activation_grad(const ActivationGradProblem& problem) {
  check_problem(problem);
  run(kActivation, problem);
}

std::string explain(const NormProblem& problem) { return explain_as(kNorm, problem); }
std::string explain(const NormGradProblem& problem) { return explain_as(kNorm, problem); }
std::string explain(const ActivationProblem& problem) { return explain_as(kActivation, problem); }
std::string explain(const ActivationGradProblem& problem) { return explain_as(kActivation, problem); }

}  // namespace quire
