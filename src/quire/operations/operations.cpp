#include "quire/operations/operations.h"

#include "quire/reference/quantize.h"

namespace quire {

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
