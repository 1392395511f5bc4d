#include "quire/quantize/quantize.h"

#include "quire/quantize/fingerprint.h"
#include "quire/quantize/reorder.h"
#include "quire/reference/quantize.h"

namespace quire {

void reorder(const ReorderProblem& problem, const Context& context) { dispatch(problem, context); }

void fingerprint(const FingerprintProblem& problem, const Context& context) { dispatch(problem, context); }

uint64_t fingerprint(const Matrix& x) {
  int64_t found = 0;
  fingerprint({.x = x, .to = &found});
  return static_cast<uint64_t>(found);
}

Statistics statistics(const QuantizeProblem& problem, Direction direction) {
  check_problem(problem);
  return reference::statistics(problem, direction);
}

}  // namespace quire
