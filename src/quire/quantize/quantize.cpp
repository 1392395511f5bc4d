#include "quire/quantize/quantize.h"

#include "quire/base/env.h"
#include "quire/quantize/kernels.h"
#include "quire/spec/check_problem.h"

namespace quire {
namespace {

constexpr std::string_view kOp = "quantize";

std::string_view forced() { return forced_kernel(env::kernel(), kOp); }

/// A side of an empty tensor has no codes and may have no memory for them, but its scale and amax are still written.
void mark_present(Side& side) {
  if (side.data == nullptr) side.data = side.scale != nullptr ? side.scale : side.amax;
}

}  // namespace

void quantize(const QuantizeProblem& problem) {
  check_problem(problem);
  QuantizeProblem p = problem;
  mark_present(p.rowwise);
  mark_present(p.columnwise);
  choose(kOp, quantize_kernels(), forced(), p).run(p);
}

void dequantize(const DequantizeProblem& problem) {
  check_problem(problem);
  choose(kOp, dequantize_kernels(), forced(), problem).run(problem);
}

std::string explain(const QuantizeProblem& problem) { return explain_rows(quantize_kernels(), forced(), problem); }

std::string explain(const DequantizeProblem& problem) { return explain_rows(dequantize_kernels(), forced(), problem); }

}  // namespace quire
