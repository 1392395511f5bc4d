#include "quire/quantize/quantize.h"

#include <vector>

#include "quire/base/env.h"
#include "quire/base/parallel.h"
#include "quire/quantize/kernels.h"
#include "quire/quantize/reference.h"
#include "quire/quantize/statistics.h"
#include "quire/spec/check_problem.h"

namespace quire {
namespace {

constexpr std::string_view kOp = "quantize";

std::string_view forced() { return forced_kernel(env::kernel(), kOp); }

void run(const QuantizeProblem& problem) {
  QuantizeProblem p = problem;
  p.rowwise = p.rowwise.marked();
  p.columnwise = p.columnwise.marked();
  choose(kOp, quantize_kernels(), forced(), p).run(p);
}

}  // namespace

void quantize(const QuantizeProblem& problem) {
  check_problem(problem);
  run(problem);
}

void quantize_each(std::span<const QuantizeProblem> problems) {
  std::vector<int64_t> costs;
  for (const QuantizeProblem& p : problems) {
    check_problem(p);
    costs.push_back(p.x.rows * p.x.cols);
  }
  parallel_tasks(costs, [&](size_t i) { run(problems[i]); });
}

void dequantize(const DequantizeProblem& problem) {
  check_problem(problem);
  choose(kOp, dequantize_kernels(), forced(), problem).run(problem);
}

std::string explain(const QuantizeProblem& problem) { return explain_rows(quantize_kernels(), forced(), problem); }

std::string explain(const DequantizeProblem& problem) { return explain_rows(dequantize_kernels(), forced(), problem); }

Statistics statistics(const QuantizeProblem& problem, Direction direction) {
  check_problem(problem);
  return reference::statistics(problem, direction);
}

}  // namespace quire
