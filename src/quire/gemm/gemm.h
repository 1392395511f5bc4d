// Products of quantized operands: validate, choose a kernel, run.
#pragma once

#include <string>

#include "quire/device/dispatch.h"

namespace quire {

/// Computes the product of GemmProblem (numerics.md 7.4). With K the length of the contraction,
///   |error before the output rounding| <= (K + 6) * 2^-24 * sum_l |a[i, l] * b[j, l]|,
/// and block sums of 4-bit elements are exact. The result does not depend on the number of threads.
/// A contraction of length 0 gives bias (+ addend). Throws Error on a problem that breaks a rule.
inline void gemm(const GemmProblem& problem, const Context& context = host()) { dispatch(problem, context); }

/// Products of plain matrices, by the library that the program lends (device/library.h).
inline void matmul(const MatmulProblem& problem, const Context& context = host()) { dispatch(problem, context); }

/// Sum over rows, for bias gradients (numerics.md 6.6).
inline void column_sum(const ColumnSumProblem& problem, const Context& context = host()) { dispatch(problem, context); }

/// One line per kernel row, as for quantize.
inline std::string explain(const GemmProblem& problem, const Context& context = host()) {
  return explain_choice(problem, context);
}
inline std::string explain(const ColumnSumProblem& problem, const Context& context = host()) {
  return explain_choice(problem, context);
}

}  // namespace quire
