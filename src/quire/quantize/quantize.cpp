#include "quire/quantize/quantize.h"

#include <vector>

#include "quire/base/parallel.h"
#include "quire/device/dispatch.h"
#include "quire/quantize/fingerprint.h"
#include "quire/quantize/reorder.h"
#include "quire/reference/quantize.h"

namespace quire {
namespace {

void run(const QuantizeProblem& problem, const Context& context) {
  QuantizeProblem p = problem;
  p.rowwise = p.rowwise.marked();
  p.columnwise = p.columnwise.marked();
  run_checked(p, context);
}

}  // namespace

void quantize(const QuantizeProblem& problem, const Context& context) {
  check_problem(problem);
  run(problem, context);
}

void amax(const AmaxProblem& problem, const Context& context) { dispatch(problem, context); }

void quantize_each(std::span<const QuantizeProblem> problems, const Context& context) {
  std::vector<int64_t> costs;
  for (const QuantizeProblem& p : problems) {
    check_problem(p);
    costs.push_back(p.x.rows * p.x.cols);
  }
  parallel_tasks(costs, [&](size_t i) { run(problems[i], context); });
}

void dequantize(const DequantizeProblem& problem, const Context& context) { dispatch(problem, context); }

void reorder(const ReorderProblem& problem, const Context& context) { dispatch(problem, context); }

void fingerprint(const FingerprintProblem& problem, const Context& context) { dispatch(problem, context); }

uint64_t fingerprint(const Matrix& x) {
  int64_t found = 0;
  fingerprint({.x = x, .to = &found});
  return static_cast<uint64_t>(found);
}

std::string explain(const QuantizeProblem& problem, const Context& context) { return explain_choice(problem, context); }
std::string explain(const DequantizeProblem& problem, const Context& context) {
  return explain_choice(problem, context);
}

Statistics statistics(const QuantizeProblem& problem, Direction direction) {
  check_problem(problem);
  return reference::statistics(problem, direction);
}

}  // namespace quire
