#include "quire/gemm/gemm.h"

#include <vector>

#include "quire/base/env.h"
#include "quire/base/parallel.h"
#include "quire/gemm/kernels.h"
#include "quire/spec/check_problem.h"

namespace quire {
namespace {

constexpr std::string_view kOp = "gemm";

std::string_view forced() { return forced_kernel(env::kernel(), kOp); }

}  // namespace

void gemm(const GemmProblem& problem) {
  check_problem(problem);
  choose(kOp, gemm_kernels(), forced(), problem).run(problem);
}

void gemm_each(std::span<const GemmProblem> problems) {
  std::vector<int64_t> costs;
  for (const GemmProblem& p : problems) {
    check_problem(p);
    // A product of few rows takes as long as reading its columns.
    costs.push_back((p.out.rows + 8) * p.out.cols * p.a.contraction);
  }
  parallel_tasks(costs, [&](size_t i) { choose(kOp, gemm_kernels(), forced(), problems[i]).run(problems[i]); });
}

void column_sum(const ColumnSumProblem& problem) {
  check_problem(problem);
  choose(kOp, column_sum_kernels(), forced(), problem).run(problem);
}

std::string explain(const GemmProblem& problem) { return explain_rows(gemm_kernels(), forced(), problem); }

std::string explain(const ColumnSumProblem& problem) { return explain_rows(column_sum_kernels(), forced(), problem); }

}  // namespace quire
