// Operations on groups of rows, such as the tokens of each expert: each group as by itself. Nothing is written if one
// of them breaks a rule. One group that has all rows is one tensor, and goes to the kernels of those.
#pragma once

#include "quire/base/context.h"
#include "quire/spec/grouped_problem.h"

namespace quire {

void grouped_quantize(const GroupedQuantizeProblem& problem, const Context& context = host());
void grouped_amax(const GroupedAmaxProblem& problem, const Context& context = host());
void grouped_dequantize(const GroupedDequantizeProblem& problem, const Context& context = host());

void grouped_gemm(const GroupedGemmProblem& problem, const Context& context = host());
void grouped_matmul(const GroupedMatmulProblem& problem, const Context& context = host());
void grouped_column_sum(const GroupedColumnSumProblem& problem, const Context& context = host());

void grouped_activation(const GroupedActivationProblem& problem, const Context& context = host());

/// Compares the fingerprints of the matrices of groups that have rows.
void grouped_fingerprint(const GroupedFingerprintProblem& problem, const Context& context = host());

}  // namespace quire
