#include "quire/gemm/gemm.h"

#include "quire/device/dispatch.h"

namespace quire {

void gemm(const GemmProblem& problem, const Context& context) { dispatch(problem, context); }

void matmul(const MatmulProblem& problem, const Context& context) { dispatch(problem, context); }

void column_sum(const ColumnSumProblem& problem, const Context& context) { dispatch(problem, context); }

std::string explain(const GemmProblem& problem, const Context& context) { return explain_choice(problem, context); }
std::string explain(const ColumnSumProblem& problem, const Context& context) {
  return explain_choice(problem, context);
}

}  // namespace quire
