#include "quire/quantize/quantize.h"

#include "quire/device/dispatch.h"
#include "quire/quantize/fingerprint.h"
#include "quire/quantize/reorder.h"
#include "quire/reference/quantize.h"
#include "quire/spec/one_group.h"

namespace quire {

void quantize(const QuantizeProblem& problem, const Context& context) {
  check_problem(problem);
  QuantizeProblem p = problem;
  p.rowwise = p.rowwise.with_sentinel_data();
  p.columnwise = p.columnwise.with_sentinel_data();
  run_checked(p, context);
}

void amax(const AmaxProblem& problem, const Context& context) { dispatch(problem, context); }

void grouped_amax(const GroupedAmaxProblem& problem, const Context& context) { dispatch(problem, context); }

void grouped_quantize(const GroupedQuantizeProblem& problem, const Context& context) {
  check_problem(problem);
  if (is_one(problem.groups) && problem.only.ends.data == nullptr) return quantize(problem_of_one(problem), context);
  run_checked(problem, context);
}

void dequantize(const DequantizeProblem& problem, const Context& context) { dispatch(problem, context); }

void grouped_dequantize(const GroupedDequantizeProblem& problem, const Context& context) {
  check_problem(problem);
  if (is_one(problem.from.groups)) return dequantize(problem_of_one(problem), context);
  run_checked(problem, context);
}

void reorder(const ReorderProblem& problem, const Context& context) { dispatch(problem, context); }

void fingerprint(const FingerprintProblem& problem, const Context& context) { dispatch(problem, context); }

void grouped_fingerprint(const GroupedFingerprintProblem& problem, const Context& context) {
  check_problem(problem);
  if (!is_one(problem.groups)) return run_checked(problem, context);
  if (problem.groups.rows > 0) fingerprint(problem_of_one(problem), context);
}

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
