#include "quire/gemm/gemm.h"

#include "quire/device/dispatch.h"
#include "quire/spec/one_group.h"

namespace quire {

void gemm(const GemmProblem& problem, const Context& context) { dispatch(problem, context); }

void grouped_gemm(const GroupedGemmProblem& problem, const Context& context) {
  check_problem(problem);
  if (is_one(problem.a.groups) && is_one(problem.b.groups)) return gemm(problem_of_one(problem), context);
  run_checked(problem, context);
}

void matmul(const MatmulProblem& problem, const Context& context) { dispatch(problem, context); }

void grouped_matmul(const GroupedMatmulProblem& problem, const Context& context) {
  check_problem(problem);
  const bool codes = problem.codes.groups.count > 0;
  if (is_one(problem.groups) && !codes) return matmul(problem_of_one(problem), context);
  run_checked(problem, context);
}

void column_sum(const ColumnSumProblem& problem, const Context& context) { dispatch(problem, context); }

void grouped_column_sum(const GroupedColumnSumProblem& problem, const Context& context) {
  check_problem(problem);
  if (is_one(problem.groups)) return column_sum(problem_of_one(problem), context);
  run_checked(problem, context);
}

std::string explain(const GemmProblem& problem, const Context& context) { return explain_choice(problem, context); }
std::string explain(const ColumnSumProblem& problem, const Context& context) {
  return explain_choice(problem, context);
}

}  // namespace quire
