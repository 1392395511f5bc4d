#include "quire/gemm/gemm.h"

#include <vector>

#include "quire/base/parallel.h"
#include "quire/device/dispatch.h"

namespace quire {

void gemm(const GemmProblem& problem, const Context& context) { dispatch(problem, context); }

void gemm_each(std::span<const GemmProblem> problems, const Context& context) {
  std::vector<int64_t> costs;
  for (const GemmProblem& p : problems) {
    check_problem(p);
    // A product of few rows takes as long as reading its columns.
    costs.push_back((p.out.rows + 8) * p.out.cols * p.a.contraction);
  }
  parallel_tasks(costs, [&](size_t i) { run_checked(problems[i], context); });
}

void column_sum(const ColumnSumProblem& problem, const Context& context) { dispatch(problem, context); }

std::string explain(const GemmProblem& problem, const Context& context) { return explain_choice(problem, context); }
std::string explain(const ColumnSumProblem& problem, const Context& context) {
  return explain_choice(problem, context);
}

}  // namespace quire
